/*
 * cmd_chat: `shoal chat`: a conversation in the terminal, with one model, streamed token by token,
 * or with the team of `shoal ask`. With --check a reply is selected among samples, and printed as a
 * whole.
 *
 * Lines come from the terminal or from a pipe; a line that begins with a slash is a command (the
 * table below). The conversation memory is that of ask; with --conversation it is kept in the
 * store. If a line causes an error, the error is printed and the chat continues; only an error of
 * the store or the engine ends it.
 *
 * On a terminal, line_editor.c edits the lines, and Ctrl-C stops a reply. Through a pipe, signals
 * have their default effect.
 */
#define _GNU_SOURCE
#include "cli/generate.h"
#include "cli/line_editor.h"
#include "cli/panel.h"
#include "cli/sample_check.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    struct setup_options setup;
    struct sampling_options sampling; /* this and the fields before `panel`: not with --team */
    int64_t samples;
    char *check;
    bool check_sandbox;
    struct panel_options panel;
    char *system, *adapter;
    bool team, history;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("system", OPT_STRING, system, NULL, 0, 0, "TEXT", "system message"),
    ROW("adapter", OPT_STRING, adapter, NULL, 0, 0, "DIR",
        "adapter, or a weighted sum of several, such as A=0.7,B=0.3"),
    ROW("max-tokens", OPT_INT, panel.max_tokens, "0", 0, 1e6, "N",
        "maximum tokens of a reply; with --team of every turn (0: 512; with --team the stage's, "
        "else the workflow's)"),
    ROW("temperature", OPT_FLOAT, panel.temperature, "-1", -1, 100, "X",
        "sampling temperature; 0: greedy (-1: 0.7; with --team each role's default)"),
    SAMPLING_ROWS(struct options, sampling),
    ROW("samples", OPT_INT, samples, "1", 1, 4096, "N",
        "samples of each reply, of which --check selects one"),
    ROW("check", OPT_STRING, check, NULL, 0, 0, "CHECK",
        "reply with the most frequent answer of the samples that pass, such as calculator, "
        "regex:PATTERN, command:WORDS (docs/EVALUATION.md)"),
    ROW("check-sandbox", OPT_BOOL, check_sandbox, "true", 0, 0, NULL,
        "run commands of --check in the sandbox"),
    ROW("team", OPT_BOOL, team, NULL, 0, 0, NULL,
        "let the team of 'shoal ask' answer, with the options from --adapters on"),
    ROW("history", OPT_BOOL, history, "true", 0, 0, NULL,
        "keep the lines typed on a terminal in ~/.local/state/shoal/history, for the arrow keys"),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    ROW("adapters", OPT_LIST, panel.adapters, NULL, 0, 0, "DIR",
        "adapter of each agent in turn; 'base' is the base model"),
    PANEL_ROWS(struct options, panel),
    {0},
};
#undef ROW

enum { TURNS_MAX = 2 * CONVERSATION_MAX_EXCHANGES + 2 };

struct chat_session {
    const struct cli_options *c;
    const struct options *o;
    struct panel panel;
    struct adapter_mix mix;    /* adapters, without --team */
    struct sample_check check; /* --check; its only prompt is the last line */
    enum language lang;        /* language of the last line */
    int64_t lines;             /* lines so far; each reply has a different seed */
    bool quit;
};

/* refusal of flags without effect */

/* Returns 1 for a flag without --team, 2 for a flag with --team, 0 for a flag of both modes. */
static int row_mode(const struct option_row *row) {
    static const char *const both[] = {"seed",       "conversation", "facts",      "model-name",
                                       "model-path", "cache-folder", "model-type", "local-files",
                                       "log",        "history",      "max-tokens", "temperature"};
    size_t at = row->offset;
    for (size_t i = 0; i < ARRAY_LEN(both); i++)
        if (strcmp(row->name, both[i]) == 0) return 0;
    if (at == offsetof(struct options, system) || at == offsetof(struct options, adapter) ||
        (at >= offsetof(struct options, sampling) && at < offsetof(struct options, panel)))
        return 1;
    return at >= offsetof(struct options, panel) && at < offsetof(struct options, system) ? 2 : 0;
}

static int flags_check(const struct options *o, struct error *err) {
    struct options defaults;
    int rc = OK, wrong = o->team ? 1 : 2;
    options_default(rows, &defaults);
    for (const struct option_row *row = rows; rc == OK && row->name; row++)
        if (row->type != OPT_ALIAS && row_mode(row) == wrong && option_changed(row, o, &defaults))
            rc = error_set(err, ERR_USAGE, "'--%s' has no effect %s --team", row->name,
                           o->team ? "with" : "without");
    options_release(rows, &defaults);
    return rc == OK ? sample_check_options(o->samples, o->check, err) : rc;
}

/* Ctrl-C: while a reply of an interactive chat is generated, it stops the reply */

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) {
    (void)sig;
    interrupted = 1;
}

static int interrupted_error(struct error *err) {
    return error_set(err, ERR_STATE, "the reply was stopped");
}

/* engine_run that Ctrl-C stops. ctx: the engine. */
static int run_until_interrupt(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    int submitted = 0, rc = OK;
    while (rc == OK && submitted < n) {
        rc = engine_submit(ctx, &reqs[submitted], err);
        if (rc == OK) submitted++;
    }
    while (rc == OK && engine_step(ctx) > 0)
        if (interrupted) rc = interrupted_error(err);
    for (int i = 0; rc != OK && i < submitted; i++) engine_cancel(ctx, &reqs[i]);
    return rc;
}

/* replies of the model, without --team */

/* A reply that is printed while it is generated. */
struct stream {
    const struct tokenizer *tok;
    struct buf raw, clean;
    int32_t n;    /* tokens decoded */
    size_t shown; /* bytes of raw that are in clean, and printed unless silent */
    bool silent;
};

static void stream_update(struct stream *s, const struct engine_request *r) {
    while (s->n < r->n_out) tokenizer_decode_token(s->tok, r->out[s->n++], false, &s->raw);
    size_t end = r->done ? s->raw.len : utf8_complete_len(s->raw.data, s->raw.len),
           from = s->clean.len;
    if (end > s->shown) buf_add_sanitized(&s->clean, s->raw.data + s->shown, end - s->shown);
    s->shown = end;
    if (s->silent || s->clean.len == from) return;
    fwrite(s->clean.data + from, 1, s->clean.len - from, stdout);
    fflush(stdout);
}

/* The values of --max-tokens and --temperature that stand for a default are those of a team. */
static int32_t reply_max_tokens(const struct options *o) {
    return o->panel.max_tokens ? (int32_t)o->panel.max_tokens : 512;
}

/* Of sample `i` of the reply to the last line. */
static struct sampling_params reply_sampling(const struct chat_session *ch, int64_t i) {
    struct sampling_options s = ch->o->sampling;
    s.temperature = ch->o->panel.temperature < 0 ? 0.7 : ch->o->panel.temperature;
    return sampling_from_options(&s, ch->lines * ch->o->samples + i);
}

/* The system message: --system, then summary and facts of the conversation. malloc'ed; NULL: none.
 */
static char *system_text(const struct chat_session *ch) {
    struct buf known = {0};
    conversation_summary_and_facts(ch->panel.pipeline.memory, ch->lang, &known);
    const char *own = ch->o->system;
    if (own && known.len) {
        char *both = xasprintf("%s\n\n%s", own, known.data);
        buf_release(&known);
        return both;
    }
    return own ? xstrdup(own) : known.data;
}

/* Encodes the system message, the exchanges from number `first` on, and the new line. */
static int transcript_encode(const struct chat_session *ch, const char *system, const char *line,
                             size_t first, struct token_ids *out, struct error *err) {
    const json_t *all = json_object_get(conversation_state(ch->panel.pipeline.memory), "exchanges"),
                 *v;
    struct chat_message m[TURNS_MAX];
    int n = 0;
    if (system) m[n++] = (struct chat_message){"system", system};
    for (size_t i = first; (v = json_array_get(all, i)); i++) {
        m[n++] = (struct chat_message){"user", json_string_value(json_object_get(v, "user"))};
        m[n++] =
            (struct chat_message){"assistant", json_string_value(json_object_get(v, "assistant"))};
    }
    m[n++] = (struct chat_message){"user", line};
    CHECK(n <= TURNS_MAX);
    const struct setup *s = &ch->panel.bases.v[ch->panel.stage_base[PIPELINE_OUTPUT]];
    out->n = 0;
    return chat_encode(s->m->tok, m, n, true, out, NULL, err);
}

/* Builds the prompt from as many of the last exchanges as leave room for the reply
 * (--max-tokens, at most half of the context). If not even zero exchanges fit, summary and facts
 * are left out. */
static int prompt_build(const struct chat_session *ch, const char *line, int32_t max_len,
                        struct token_ids *out, struct error *err) {
    int32_t want = MIN(reply_max_tokens(ch->o), max_len / 2);
    size_t n = json_array_size(
        json_object_get(conversation_state(ch->panel.pipeline.memory), "exchanges"));
    char *system = system_text(ch);
    int rc = OK;
    for (size_t first = 0; rc == OK; first++) {
        rc = transcript_encode(ch, first > n ? ch->o->system : system, line, first, out, err);
        if (rc != OK || out->n + want <= max_len || first > n) break;
    }
    free(system);
    if (rc == OK && out->n >= max_len)
        rc = error_set(err, ERR_USAGE, "%d tokens leave no room in a context of %d", out->n,
                       max_len);
    return rc;
}

static json_t *reply_json(const char *line, const char *answer, const char *source) {
    return json_pack("{s:s,s:s,s:s}", "user", line, "answer", answer, "source", source);
}

static json_t *reply_json_with_tokens(const char *line, const char *answer, int64_t prefilled,
                                      int64_t generated) {
    json_t *v = reply_json(line, answer, "model");
    json_object_set_new(v, "prefilled", json_integer(prefilled));
    json_object_set_new(v, "generated", json_integer(generated));
    return v;
}

/* The request for sample i of a reply; stop: [2], of the caller. */
static struct engine_request reply_request(const struct chat_session *ch, const struct setup *s,
                                           const struct token_ids *prompt, int32_t *stop,
                                           int64_t i) {
    struct engine_request r = {.prompt = prompt->v,
                               .n_prompt = prompt->n,
                               .sampling = reply_sampling(ch, i),
                               .max_tokens =
                                   MIN(reply_max_tokens(ch->o), engine_max_len(s->e) - prompt->n),
                               .loop_tokens = (int32_t)ch->o->sampling.loop_tokens,
                               .stop = stop,
                               .n_stop = model_stop_tokens(s->m, stop)};
    adapter_mix_apply(&ch->mix, &r);
    return r;
}

static int reply_single(struct chat_session *ch, const char *line, struct error *err) {
    struct setup *s = panel_base(&ch->panel, PIPELINE_OUTPUT);
    int32_t stop[2];
    struct token_ids prompt = {0};
    struct stream to = {.tok = s->m->tok, .silent = ch->c->json};
    int rc = prompt_build(ch, line, engine_max_len(s->e), &prompt, err);
    struct engine_request r = reply_request(ch, s, &prompt, stop, 0);
    if (rc == OK) rc = engine_submit(s->e, &r, err);
    while (rc == OK && !r.done) {
        engine_step(s->e);
        if (interrupted) engine_cancel(s->e, &r);
        stream_update(&to, &r);
    }
    interrupted = 0; // the text so far counts as the reply; the memory is updated
    buf_puts(&to.clean, "");
    if (rc == OK && ch->c->json)
        cli_print_json(reply_json_with_tokens(line, to.clean.data, r.n_prefilled, r.n_generated));
    if (rc == OK && !ch->c->json) puts("");
    if (rc == OK && to.clean.len)
        rc = pipeline_update_memory(&ch->panel.pipeline, line, to.clean.data, NULL, err);
    engine_request_release(&r);
    token_ids_release(&prompt);
    buf_release(&to.raw);
    buf_release(&to.clean);
    return rc;
}

/* replies selected by --check */

static int chat_check_open(struct chat_session *ch, struct error *err) {
    if (!ch->o->check) return OK;
    return sample_check_open_lines(&ch->check, ch->o->check, ch->o->check_sandbox,
                                   (int)ch->o->samples, err);
}

/* Prints the selected reply, and on stderr how many samples passed and the tokens of all samples
 * and of the check. */
static void selected_print(const struct chat_session *ch, const struct engine_request *reqs,
                           const char *line, const char *reply) {
    const struct sample_check *c = &ch->check;
    int64_t prefilled = c->questioner.prefilled, generated = c->questioner.generated;
    for (int i = 0; i < c->n_samples; i++) {
        prefilled += reqs[i].n_prefilled;
        generated += reqs[i].n_generated;
    }
    if (ch->c->json) {
        json_t *v = reply_json_with_tokens(line, reply, prefilled, generated);
        sample_check_add_json(c, v);
        cli_print_json(v);
        return;
    }
    printf("%s\n", reply);
    sample_check_log(c, prefilled, generated);
}

/* Checks the samples and replies with the selected one, or without an answer with the first. */
static int samples_reply(struct chat_session *ch, struct setup *s,
                         const struct engine_request *reqs, const char *line, struct error *err) {
    struct sample_check *c = &ch->check;
    char **texts = xcalloc((size_t)c->n_samples, sizeof *texts);
    for (int i = 0; i < c->n_samples; i++) {
        struct stream to = {.tok = s->m->tok, .silent = true};
        stream_update(&to, &reqs[i]);
        buf_puts(&to.clean, "");
        buf_release(&to.raw);
        texts[i] = to.clean.data;
    }
    c->engine.run = run_until_interrupt;
    c->engine.run_ctx = s->e;
    sample_check_set_question(c, 0, line);
    int rc = sample_check_run(c, s, texts, err);
    const char *reply = rc == OK ? texts[MAX(c->selected[0], 0)] : "";
    if (rc == OK) selected_print(ch, reqs, line, reply);
    if (rc == OK && *reply) rc = pipeline_update_memory(&ch->panel.pipeline, line, reply, NULL, err);
    for (int i = 0; i < c->n_samples; i++) free(texts[i]);
    free(texts);
    return rc;
}

static int reply_selected(struct chat_session *ch, const char *line, struct error *err) {
    struct setup *s = panel_base(&ch->panel, PIPELINE_OUTPUT);
    const int n = ch->check.n_samples;
    int32_t stop[2];
    struct token_ids prompt = {0};
    struct engine_request *reqs = xcalloc((size_t)n, sizeof *reqs);
    int rc = prompt_build(ch, line, engine_max_len(s->e), &prompt, err);
    for (int i = 0; i < n; i++) reqs[i] = reply_request(ch, s, &prompt, stop, i);
    if (rc == OK) rc = run_until_interrupt(s->e, reqs, n, err);
    if (rc == OK) rc = samples_reply(ch, s, reqs, line, err);
    for (int i = 0; i < n; i++) engine_request_release(&reqs[i]);
    free(reqs);
    token_ids_release(&prompt);
    return rc;
}

/* replies of the team */

static int do_board(struct chat_session *ch, const char *arg, struct error *err) {
    (void)arg;
    (void)err;
    if (ch->c->json)
        cli_print_json(
            json_pack("{s:o}", "board", blackboard_debug_view(ch->panel.pipeline.board)));
    else
        panel_board_print(&ch->panel);
    return OK;
}

static void on_progress(void *ctx, const char *role, int iteration, int n) {
    (void)ctx;
    if (strcmp(role, "agent") == 0)
        log_info("[%d] %d agents think", iteration, n);
    else if (strcmp(role, "summary") == 0)
        log_info("[%d] writing a summary", iteration);
    else if (strcmp(role, "output") == 0)
        log_info("answering");
    else
        log_info("[%d] %s", iteration, role);
}

static int reply_team(struct chat_session *ch, const char *line, struct error *err) {
    struct pipeline_answer a;
    int rc = pipeline_run(&ch->panel.pipeline, line, &a, err);
    if (rc == OK && a.failure_reason)
        log_warn("%s: %s", answer_source_names[a.source], a.failure_reason);
    if (rc == OK && ch->c->json)
        cli_print_json(reply_json(line, a.text, answer_source_names[a.source]));
    if (rc == OK && !ch->c->json) printf("%s\n", a.text);
    pipeline_answer_release(&a);
    return rc == OK && ch->o->panel.board ? do_board(ch, "", err) : rc;
}

/* commands; `arg` is the rest of the line, "" without one */

static int do_help(struct chat_session *ch, const char *arg, struct error *err);

/* All exchanges of a stored conversation, else those in memory; NULL sets err. */
static json_t *exchanges_all(const struct chat_session *ch, struct error *err) {
    const struct panel *p = &ch->panel;
    if (ch->o->panel.conversation)
        return conversation_history(p->store, ch->o->panel.conversation, 0, INT64_MAX, err);
    return json_incref(json_object_get(conversation_state(p->pipeline.memory), "exchanges"));
}

/* Saves the conversation as one line of training data for 'shoal train'. */
static int do_save(struct chat_session *ch, const char *arg, struct error *err) {
    struct buf text = {0};
    size_t i;
    if (!*arg) return error_set(err, ERR_USAGE, "name a file: /save FILE");
    json_t *all = exchanges_all(ch, err), *turns = json_array(), *v;
    int rc = all ? OK : err->code;
    if (ch->o->system) messages_add(turns, "system", ch->o->system);
    json_array_foreach (all, i, v) {
        messages_add(turns, "user", json_string_value(json_object_get(v, "user")));
        messages_add(turns, "assistant", json_string_value(json_object_get(v, "assistant")));
    }
    messages_to_jsonl(&text, turns);
    if (rc == OK) rc = file_write_private(arg, text.data, text.len, err);
    if (rc == OK) log_info("%zu exchanges saved in '%s'", json_array_size(all), arg);
    json_decref(all);
    buf_release(&text);
    return rc;
}

static int do_reset(struct chat_session *ch, const char *arg, struct error *err) {
    (void)arg;
    int rc = conversation_clear(ch->panel.pipeline.memory, err);
    if (rc == OK) rc = blackboard_clear_current_turn(ch->panel.pipeline.board, err);
    if (rc == OK) log_info("conversation and facts are removed");
    return rc;
}

static int do_adapter(struct chat_session *ch, const char *arg, struct error *err) {
    struct adapter_mix next;
    struct setup *s = panel_base(&ch->panel, ch->o->team ? PIPELINE_INTERNAL : PIPELINE_OUTPUT);
    if (!*arg) return error_set(err, ERR_USAGE, "name one: /adapter DIR, or /adapter base");
    int rc = adapter_mix_parse(&next, strcmp(arg, "base") == 0 ? NULL : arg, err);
    if (rc == OK && ch->o->team && next.weighted)
        rc = error_set(err, ERR_USAGE, "a team's agents have one adapter each, not a mix");
    if (rc == OK) rc = adapter_mix_open(&next, setup_load_adapter, s, err);
    if (rc != OK) {
        adapter_mix_release(&next);
        return rc;
    }
    adapter_mix_release(&ch->mix);
    ch->mix = next;
    for (int i = 0; ch->o->team && i < TEAM_MAX; i++) ch->panel.adapters[i] = next.terms[0].adapter;
    log_info("the adapter is '%s'", arg);
    return OK;
}

static int do_facts(struct chat_session *ch, const char *arg, struct error *err) {
    (void)arg;
    (void)err;
    const json_t *state = conversation_state(ch->panel.pipeline.memory);
    struct buf known = {0};
    conversation_summary_and_facts(ch->panel.pipeline.memory, ch->lang, &known);
    if (ch->c->json)
        cli_print_json(json_pack("{s:O,s:O}", "facts", json_object_get(state, "facts"), "summary",
                                 json_object_get(state, "summary")));
    else if (known.len)
        fputs(known.data, stdout);
    else
        log_info("nothing is known yet");
    buf_release(&known);
    return OK;
}

static int do_forget(struct chat_session *ch, const char *arg, struct error *err) {
    if (!*arg) return error_set(err, ERR_USAGE, "name what: /forget TEXT, or /forget all");
    return conversation_forget_facts(ch->panel.pipeline.memory, arg, err);
}

static int do_quit(struct chat_session *ch, const char *arg, struct error *err) {
    (void)arg;
    (void)err;
    ch->quit = true;
    return OK;
}

static const struct {
    const char *name, *arg, *help; /* help: NULL for another name of the command above */
    int (*run)(struct chat_session *ch, const char *arg, struct error *err);
} commands[] = {
    {"/help", "", "this list; begin a line with // for a message that begins with a slash",
     do_help},
    {"/save", "FILE", "write the exchanges to a file for 'shoal train'", do_save},
    {"/reset", "", "forget the conversation and the facts", do_reset},
    {"/adapter", "DIR", "use another adapter, or a mix A=0.7,B=0.3; base: none", do_adapter},
    {"/facts", "", "print the key facts about you and the summary", do_facts},
    {"/forget", "TEXT", "remove the facts that contain this text; all: all facts", do_forget},
    {"/board", "", "print the blackboard", do_board},
    {"/quit", "", "end the chat; also /exit and /bye", do_quit},
    {"/exit", "", NULL, do_quit},
    {"/bye", "", NULL, do_quit},
};

static int do_help(struct chat_session *ch, const char *arg, struct error *err) {
    (void)ch;
    (void)arg;
    (void)err;
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (commands[i].help)
            printf("%-8s %-5s %s\n", commands[i].name, commands[i].arg, commands[i].help);
    return OK;
}

/* For line_editor.h. */
static const char *command_name(int i, enum line_argument *arg) {
    if (i >= (int)ARRAY_LEN(commands)) return NULL;
    const char *a = commands[i].arg;
    *arg = strcmp(a, "DIR") == 0 || strcmp(a, "FILE") == 0 ? LINE_ARG_PATH
           : *a                                            ? LINE_ARG_TEXT
                                                           : LINE_ARG_NONE;
    return commands[i].name;
}

static int unknown_command_error(const char *line, size_t n, struct error *err) {
    const char *names[ARRAY_LEN(commands)];
    char *word = xstrndup(line, n);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) names[i] = commands[i].name + 1;
    const char *near = name_suggest(names, (int)ARRAY_LEN(commands), word + 1);
    int rc = near ? error_set(err, ERR_USAGE,
                              "no command '%s', did you mean '/%s'? /help lists all", word, near)
                  : error_set(err, ERR_USAGE, "no command '%s'; /help lists them", word);
    free(word);
    return rc;
}

static int command_run(struct chat_session *ch, const char *line, struct error *err) {
    size_t n = strcspn(line, " \t");
    const char *arg = line + n + strspn(line + n, " \t");
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strlen(commands[i].name) == n && strncmp(commands[i].name, line, n) == 0)
            return commands[i].run(ch, arg, err);
    return unknown_command_error(line, n, err);
}

/* Whether the chat continues after this error. */
static bool is_recoverable(int rc) {
    return rc == ERR_USAGE || rc == ERR_MISSING || rc == ERR_FORMAT || rc == ERR_MISMATCH;
}

static int line_handle(struct chat_session *ch, const char *line, struct error *err) {
    struct error own = {0};
    interrupted = 0;
    json_t *text = json_string(line);
    int rc = text ? OK : error_set(&own, ERR_FORMAT, "the line is not UTF-8");
    json_decref(text);
    if (rc == OK) rc = conversation_refresh(ch->panel.pipeline.memory, &own);
    if (rc == OK && line[0] == '/' && line[1] != '/') {
        rc = command_run(ch, line, &own);
        if (rc != OK) rc = ERR_USAGE; /* an error of a command never ends the chat */
    } else if (rc == OK) {
        line += line[0] == '/';
        ch->lang = language_detect(line);
        rc = (ch->o->team    ? reply_team
              : ch->o->check ? reply_selected
                             : reply_single)(ch, line, &own);
        ch->lines++;
    }
    fflush(stdout);
    if (rc == OK) return OK;
    if (is_recoverable(rc) || interrupted) {
        log_warn("%s", own.text);
        return OK;
    }
    *err = own;
    return rc;
}

/* A line of text without blanks around it; NULL: nothing is left to do with it. */
static char *line_trim(char *line) {
    size_t n = strlen(line);
    while (n > 0 && strchr(" \t\r\n", line[n - 1])) line[--n] = 0;
    return n > 0 ? line + strspn(line, " \t") : NULL;
}

/* Without line editing. prompt: for a terminal, where Ctrl-C at the prompt ends the program. */
static int chat_without_editor(struct chat_session *ch, bool prompt, struct error *err) {
    char *buf = NULL, *line;
    size_t size = 0;
    int rc = OK;
    while (rc == OK && !ch->quit) {
        if (prompt) printf("> ");
        fflush(stdout);
        if (getline(&buf, &size, stdin) < 0) break;
        if (prompt) signal(SIGINT, on_interrupt);
        if ((line = line_trim(buf)) != NULL) rc = line_handle(ch, line, err);
        if (prompt) signal(SIGINT, SIG_DFL);
    }
    free(buf);
    return rc;
}

/* Ctrl-C clears the line. On an empty line, the second one in a row ends the chat. */
static int chat_with_editor(struct chat_session *ch, struct line_editor *ed, struct error *err) {
    int rc = OK, n_empty = 0;
    signal(SIGINT, on_interrupt);
    while (rc == OK && !ch->quit) {
        char *line;
        enum line_result got = line_editor_read(ed, &line);
        bool empty = got == LINE_CLEARED && !*line;
        n_empty = empty ? n_empty + 1 : 0;
        if (got == LINE_END || n_empty == 2) break;
        if (empty) log_info("Ctrl-D, /quit or a second Ctrl-C ends the chat");
        if (got == LINE_READ && (line = line_trim(line)) != NULL) rc = line_handle(ch, line, err);
    }
    signal(SIGINT, SIG_DFL);
    return rc;
}

static int chat_loop(struct chat_session *ch, struct error *err) {
    struct line_editor_options eo = {
        .prompt = "> ", .command = command_name, .history = ch->o->history};
    bool interactive = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    if (!interactive) return chat_without_editor(ch, false, err);
    for (int i = 0; i < ch->panel.bases.n; i++) {
        ch->panel.engine_clients[i].run = run_until_interrupt;
        ch->panel.engine_clients[i].run_ctx = ch->panel.bases.v[i].e;
    }
    log_info("/help lists the commands, /quit ends");
    struct line_editor *ed = line_editor_open(&eo);
    int rc = ed ? chat_with_editor(ch, ed, err) : chat_without_editor(ch, true, err);
    line_editor_close(ed);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct chat_session ch = {.c = c, .o = o, .lang = LANG_EN};
    bool named = panel_names_model(&o->panel);
    int rc = flags_check(o, err);
    if (rc == OK && args->n != !named)
        rc = error_set(err, ERR_USAGE, "name the model to talk to, once");
    if (rc == OK) rc = adapter_mix_parse(&ch.mix, o->adapter, err);
    if (rc == OK) rc = chat_check_open(&ch, err);
    struct panel_params w = {.model = named     ? NULL
                                      : args->n ? args->v[0]
                                                : NULL,
                             .seed = (uint64_t)o->sampling.seed,
                             .adapters = o->team ? &o->panel.adapters : &ch.mix.paths,
                             .remember = true};
    if (rc == OK) {
        rc = panel_open(&ch.panel, c, &o->setup, &o->panel, &w, err);
        ch.panel.pipeline.progress = on_progress;
        if (rc == OK && ch.panel.ready) {
            rc = panel_start(&ch.panel, &w, err);
            if (rc == OK)
                rc = adapter_mix_open(&ch.mix, setup_load_adapter,
                                      panel_base(&ch.panel, PIPELINE_OUTPUT), err);
            if (rc == OK) rc = chat_loop(&ch, err);
        }
        rc = panel_close(&ch.panel, rc, err);
    }
    adapter_mix_release(&ch.mix);
    sample_check_release(&ch.check);
    return rc;
}

const struct cli_command cmd_chat = {
    .name = "chat",
    .args = "MODEL",
    .summary = "chat with a model or a team in the terminal",
    .about =
        "Lines are read from the terminal or a pipe; /help lists the commands. On a terminal the\n"
        "arrow keys edit the line and recall earlier ones, Ctrl-R searches them, Tab completes\n"
        "commands and paths, Ctrl-C stops a reply or clears the line, and Ctrl-D ends. The prompt\n"
        "contains the last ten exchanges, a summary of the earlier ones, and key facts;\n"
        "--conversation keeps them in the store. With --team the agents of 'shoal ask' answer.\n"
        "With --check a reply is the most frequent answer of the --samples that pass.\n"
        "\n"
        "  shoal chat model.gguf --system '簡潔に答えてください。' --conversation me\n"
        "  shoal chat model.gguf --adapter critic=0.7,explorer=0.3 --temperature 0.5\n"
        "  shoal chat models/fry --samples 8 --check calculator\n"
        "  shoal chat model.gguf --team --agents 4 --knowledge notes.db --conversation me",
    .main_options = "system adapter max-tokens temperature seed samples check team conversation "
                    "knowledge board max-model-len max-memory dry-run",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 1,
    .run = run,
};
