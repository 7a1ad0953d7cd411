/*
 * cmd_ask: `shoal ask`: a team answers a question. Agents with roles think in one batch, one writes
 * a summary, they think again, and one of them writes the answer; the workflow is
 * protocols/panel.yaml. All messages are kept on a blackboard in the store. With --check the answer
 * is selected among samples of it.
 *
 * Without a question, questions are read from stdin, one per line.
 */
#define _GNU_SOURCE
#include "cli/panel.h"
#include "cli/sample_check.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct panel_options panel;
    char *forget, *check;
    int64_t seed, samples;
    bool check_sandbox;
};
#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, __VA_ARGS__ }
static const struct option_row rows[] = {
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of the sampling"),
    ROW("adapter", OPT_LIST, panel.adapters, NULL, 0, 0, "DIR",
        "adapter of each agent in turn; 'base' is the base model", JOB_ARG_BUILTIN_OR_PATH),
    ROW("max-tokens", OPT_INT, panel.max_tokens, "0", 0, 65536, "N",
        "maximum tokens of every turn (0: the stage's, else the workflow's)"),
    ROW("temperature", OPT_FLOAT, panel.temperature, "-1", -1, 100, "X",
        "sampling temperature of all roles (-1: each role's default)"),
    ROW("samples", OPT_INT, samples, "1", 1, 4096, "N",
        "samples of the answer, of which --check selects one"),
    ROW("check", OPT_STRING, check, NULL, 0, 0, "CHECK",
        "print the most frequent answer of the samples that pass, such as calculator, "
        "regex:PATTERN, command:WORDS (docs/EVALUATION.md)",
        JOB_ARG_REWARD),
    ROW("check-sandbox", OPT_BOOL, check_sandbox, "true", 0, 0, NULL,
        "run commands of --check in the sandbox", JOB_ARG_FORBIDDEN),
    ROW("forget", OPT_STRING, forget, NULL, 0, 0, "TEXT",
        "remove the key facts of --conversation that contain this text ('all': all facts), and "
        "exit",
        JOB_ARG_TEXT),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    PANEL_ROWS(struct options, panel),
    {"adapters", OPT_ALIAS, 0, "adapter"},
    {0},
};
#undef ROW

struct ask {
    struct panel panel;
    struct sample_check check; /* --check; its only prompt is the last question */
    bool checked;              /* whether the last answer was selected by it */
};

/* answer_selector.select */
static int sample_select(void *ctx, const char *question, char *const *texts, int n, int *selected,
                         struct error *err) {
    struct ask *s = ctx;
    (void)n; // the check's number of samples
    sample_check_set_question(&s->check, 0, question);
    int rc = sample_check_run(&s->check, panel_base(&s->panel, PIPELINE_OUTPUT), texts, err);
    if (rc == OK) *selected = MAX(s->check.selected[0], 0);
    s->checked = rc == OK;
    return rc;
}

static void answer_print_json(const struct ask *s, const struct pipeline_answer *a) {
    const struct panel *p = &s->panel;
    json_t *messages = json_array();
    for (int i = 0; i < a->transcript.n; i++) {
        const struct utterance *u = &a->transcript.v[i];
        json_array_append_new(messages, json_pack("{s:s,s:i,s:s}", "name", a->names[u->agent],
                                                  "round", u->round, "text", u->text));
    }
    json_t *line = json_pack("{s:s,s:s,s:o}", "answer", a->text, "source",
                             answer_source_names[a->source], "said", messages);
    if (s->checked) {
        json_object_set_new(line, "prefilled",
                            json_integer(a->sampled.prefilled + s->check.questioner.prefilled));
        json_object_set_new(line, "generated",
                            json_integer(a->sampled.generated + s->check.questioner.generated));
        sample_check_add_json(&s->check, line);
    }
    if (p->o->board) json_object_set_new(line, "board", blackboard_debug_view(p->pipeline.board));
    cli_print_json(line);
}

static int answer(void *ctx, const char *question, struct error *err) {
    struct ask *s = ctx;
    struct panel *p = &s->panel;
    struct pipeline_answer a;
    s->checked = false;
    int rc = pipeline_run(&p->pipeline, question, &a, err);
    if (rc == OK && a.failure_reason)
        log_warn("%s: %s", answer_source_names[a.source], a.failure_reason);
    if (rc == OK && p->c->json) answer_print_json(s, &a);
    if (rc == OK && !p->c->json) printf("%s\n", a.text);
    if (rc == OK && !p->c->json && s->checked)
        sample_check_log(&s->check, a.sampled.prefilled + s->check.questioner.prefilled,
                         a.sampled.generated + s->check.questioner.generated);
    if (rc == OK && !p->c->json && p->o->board) panel_board_print(p);
    fflush(stdout);
    pipeline_answer_release(&a);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    bool named = panel_names_model(&o->panel);
    if (args->n < !named || args->n > 2 - named)
        return error_set(err, ERR_USAGE,
                         named ? "--model-name and --model-path replace MODEL: give a question "
                                 "with them, or nothing"
                               : "no model: name the base model of the team");
    if (o->forget && !o->panel.conversation)
        return error_set(err, ERR_USAGE, "'--forget' needs --conversation ID");
    if (o->forget) return panel_forget(c, &o->setup, o->panel.conversation, o->forget, err);
    const char *question = args->n == 2 - named ? args->v[1 - named] : NULL;
    const struct panel_params w = {.model = named ? NULL : args->v[0],
                                   .seed = (uint64_t)o->seed,
                                   .adapters = &o->panel.adapters};
    struct ask s = {0};
    int rc = sample_check_options(o->samples, o->check, err);
    if (rc == OK && o->check)
        rc = sample_check_open_lines(&s.check, o->check, o->check_sandbox, (int)o->samples, err);
    if (rc == OK) {
        rc = panel_open(&s.panel, c, &o->setup, &o->panel, &w, err);
        if (o->check)
            s.panel.pipeline.selector =
                (struct answer_selector){(int)o->samples, sample_select, &s};
        if (rc == OK && s.panel.ready) rc = panel_start(&s.panel, &w, err);
        if (rc == OK && s.panel.ready)
            rc = question ? answer(&s, question, err) : prompts_each_line(answer, &s, err);
        rc = panel_close(&s.panel, rc, err);
    }
    sample_check_release(&s.check);
    return rc;
}

const struct cli_command cmd_ask = {
    .name = "ask",
    .args = "MODEL [QUESTION]",
    .summary = "a team with roles thinks about a question and answers it",
    .about =
        "Agents with roles, which depend on the kind of question, think in one batch; a summary\n"
        "is written; they think again; one of them writes the answer. All messages are kept on\n"
        "a blackboard in the store (--board prints it). Without a question, questions are read\n"
        "from stdin, one per line. --conversation keeps the exchanges and key facts about the\n"
        "user for later questions. Each stage may have its own model; all models share\n"
        "--max-memory. With --check the answer is the most frequent one of its --samples that\n"
        "pass.\n"
        "\n"
        "  shoal ask model.gguf --agents 3 --iterations 2 'ニュートンの第二法則とは何ですか？'\n"
        "  shoal ask small.gguf --output-model large.gguf --output-temperature 0.5 "
        "'为什么天是蓝的？'\n"
        "  shoal ask model.gguf --knowledge notes.db --conversation me\n"
        "  shoal ask model.gguf --conversation me --forget all",
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH, JOB_ARG_TEXT}, false}, {0}},
    .job_store_option = "store",
    .main_options = "agents iterations adapter language protocol temperature max-tokens "
                    "max-seconds knowledge conversation board max-memory dry-run seed",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 2,
    .run = run,
};
