/*
 * builtin_team: the tools ask and debate: a team of agents on the same model answers a question.
 *
 * ask lets the team answer freely. debate names the answers, and the team decides by its workflow
 * and vote. Both run between two steps of the agent, and the tokens of the team count as those of
 * the step.
 */
#define _GNU_SOURCE
#include "agent/internal.h"
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

enum { QUESTION_CHARS = 4000, CHOICES_CHARS = 2000 };

struct team_tool {
    const struct agent_team *team; /* borrowed */
    int64_t prefilled, generated;  /* since the last team_spent */
};

static int team_open(const struct agent_tool_options *o, void **ctx, struct error *err) {
    (void)err;
    struct team_tool *t = *ctx = xcalloc(1, sizeof *t);
    t->team = o->team;
    return OK;
}

static void team_spent(void *ctx, int64_t *prefilled, int64_t *generated) {
    struct team_tool *t = ctx;
    *prefilled = t->prefilled;
    *generated = t->generated;
    t->prefilled = t->generated = 0;
}

/* Runs the team on an item and appends its reply, and the share of the votes of a decision. */
static int item_run(struct team_tool *t, const struct task_item *item, struct buf *out,
                    struct error *err) {
    const struct agent_team *g = t->team;
    struct engine_client engine = {
        .engine = g->engine, .model = g->model, .run = g->run, .run_ctx = g->run_ctx};
    struct llm_client client = engine_client_as_llm(&engine);
    struct debate debate = {0};
    int rc =
        debate_run(&client, g->team->v, g->team->n, item, 1, &g->team->options, &debate, NULL, err);
    t->prefilled += debate.prefilled;
    t->generated += debate.generated;
    if (rc == OK) buf_puts(out, transcript_reply(&debate.transcripts[0]));
    debate_release(&debate);
    return rc;
}

static struct task_item item_of(const json_t *arguments) {
    char *question = xstrdup(json_get_string(arguments, "question"));
    return (struct task_item){
        .question = question, .correct = -1, .lang = language_names[language_detect(question)]};
}

static int ask_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct task_item item = item_of(arguments);
    int rc = item_run(ctx, &item, out, err);
    task_item_release(&item);
    return rc;
}

/* Adds the choices of a list that '|' separates, without white space around them. */
static int choices_add(struct task_item *item, const char *list, struct error *err) {
    char *copy = xstrdup(list), *rest = copy, *choice;
    int rc = OK;
    while (rc == OK && (choice = strsep(&rest, "|"))) {
        char *text = text_trimmed(choice);
        if (item->n_choices == EVAL_MAX_CHOICES)
            rc = error_set(err, ERR_USAGE, "there are more than %d choices", EVAL_MAX_CHOICES);
        if (*text && rc == OK)
            item->choices[item->n_choices++] = text;
        else
            free(text);
    }
    free(copy);
    if (rc == OK && item->n_choices < 2)
        rc = error_set(err, ERR_USAGE, "a debate needs at least two choices, separated by |");
    return rc;
}

static int debate_call(void *ctx, const json_t *arguments, struct buf *out, struct error *err) {
    struct task_item item = item_of(arguments);
    int rc = choices_add(&item, json_get_string(arguments, "choices"), err);
    if (rc == OK) rc = item_run(ctx, &item, out, err);
    task_item_release(&item);
    return rc;
}

#define QUESTION_ARGUMENT                                                                          \
    { "question", "the question, with all that is needed to answer it", QUESTION_CHARS }
const struct tool_kind ask_kind = {.need = NEEDS_TEAM,
                                   .arguments = {QUESTION_ARGUMENT},
                                   .open = team_open,
                                   .call = ask_call,
                                   .spent = team_spent,
                                   .release = free},
                       debate_kind = {
                           .need = NEEDS_TEAM,
                           .arguments = {QUESTION_ARGUMENT,
                                         {"choices", "the possible answers, separated by |",
                                          CHOICES_CHARS}},
                           .open = team_open,
                           .call = debate_call,
                           .spent = team_spent,
                           .release = free};
