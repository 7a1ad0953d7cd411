/*
 * debate_request: the options of a debate, for the command and the library; the questions that they
 * describe; and the debate of a team on a task.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TRANSCRIPTS = 5, SAMPLE_TOKENS = 24 }; /* transcripts in a report */
static const float SAMPLE_TEMPERATURE = 0.7f;

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct debate_request, field), fallback, min, max, metavar, __VA_ARGS__ }
const struct option_row debate_request_rows[] = {
    ROW("personas", OPT_LIST, personas, NULL, 0, 0, "TEXT", "the agents' system prompts",
        JOB_ARG_TEXT),
    ROW("topic", OPT_STRING, topic, NULL, 0, 0, "TEXT", "one question", JOB_ARG_TEXT),
    ROW("choices", OPT_LIST, choices, NULL, 0, 0, "TEXT",
        "possible answers to --topic; without it, any answer", JOB_ARG_TEXT),
    ROW("grader", OPT_STRING, grader, NULL, 0, 0, "NAME",
        "without --choices: extracts and compares answers: number, math, letter …", JOB_ARG_TEXT),
    ROW("tasks", OPT_STRING, tasks, NULL, 0, 0, "LIST",
        "tasks instead of --topic, as for 'shoal eval': names, JSONL files, recipes; fry; or tasks "
        "that need communication: largest, earliest",
        JOB_ARG_BUILTIN_OR_PATH_LIST),
    ROW("data", OPT_STRING, data, NULL, 0, 0, "DIR", "folder of the files of named tasks",
        JOB_ARG_INPUT_PATH),
    ROW("n", OPT_INT, n, "200", 0, 1e6, "N", "questions per task; 0: the default of 'shoal eval'"),
    ROW("shots", OPT_INT, shots, "0", 0, 1000, "N",
        "few-shot examples, from the task's dev or train file"),
    ROW("protocol", OPT_STRING, protocol, NULL, 0, 0, "NAME",
        "built-in protocol (default brief), or a workflow file", JOB_ARG_BUILTIN_OR_PATH),
    ROW("rounds", OPT_INT, rounds, "-1", -1, 64, "N",
        "maximum rounds (-1: the protocol's); 0: check the arguments and exit"),
    ROW("vote", OPT_STRING, vote, NULL, 0, 0, "NAME",
        "majority, confidence, logprob, borda, quorum or weighted (default: the protocol's)",
        JOB_ARG_TEXT),
    ROW("chain-of-thought", OPT_BOOL, chain_of_thought, "true", 0, 0, NULL,
        "write a chain of thought before the answer"),
    ROW("max-tokens", OPT_INT, max_tokens, "0", 0, 65536, "N",
        "maximum tokens of the message of a turn (0: the protocol's)"),
    ROW("temperature", OPT_FLOAT, temperature, "-1", -1, 100, "X",
        "sampling temperature of the messages (-1: the protocol's)"),
    ROW("max-seconds", OPT_FLOAT, seconds, "0", 0, 1e9, "S",
        "seconds after which no agent starts a turn; the vote counts the answers until then (0: "
        "the protocol's)"),
    ROW("samples", OPT_INT, samples, "32", 0, 256, "N",
        "--tasks: maximum samples of self-consistency; 0: none"),
    ROW("free-answers", OPT_BOOL, free_answers, NULL, 0, 0, NULL,
        "--tasks: the agents generate the answers of generated tasks instead of choosing them"),
    ROW("check", OPT_STRING, check, NULL, 0, 0, "CHECK",
        "--tasks: also sample answers and keep those that pass: question (put to the base model), "
        "calculator, regex:PATTERN, json-schema:FILE, tests, sql:FILE, command:WORDS",
        JOB_ARG_REWARD),
    ROW("check-sandbox", OPT_BOOL, check_sandbox, "true", 0, 0, NULL,
        "run commands of --check in the sandbox", JOB_ARG_FORBIDDEN),
    ROW("check-samples", OPT_INT, check_samples, "6", 1, 256, "N",
        "--check: samples per question, the agents in turn"),
    ROW("passes", OPT_INT, passes, "1", 1, 256, "K",
        "--check: stop sampling a question when K answers passed"),
    ROW("credit", OPT_STRING, credit, "vote", 0, 0, "NAME",
        "--tasks: Shapley, Banzhaf and leave-one-out values for the first vote (vote) or the whole "
        "debate (debate); or none",
        JOB_ARG_TEXT),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of questions, orders and samples"),
    {0},
};
#undef ROW

static int credit_check(const char *name, struct error *err) {
    static const char *const known[] = {"vote", "debate", "none"};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strcmp(name, known[i]) == 0) return OK;
    return error_set(err, ERR_USAGE, "no credit of a '%s'; there are vote, debate and none", name);
}

int debate_request_apply(const struct debate_request *r, struct debate_options *o,
                         struct error *err) {
    o->seed = (uint64_t)r->seed;
    o->chain_of_thought &= r->chain_of_thought;
    if (r->rounds > 0) o->rounds = (int)r->rounds;
    if (r->temperature >= 0) o->temperature = (float)r->temperature;
    if (r->max_tokens) o->max_tokens = (int32_t)r->max_tokens;
    if (r->seconds > 0) o->seconds = r->seconds;
    if (r->vote && !(o->vote = vote_parse(r->vote, err))) return err->code;
    if (r->grader && !(o->grader = grader_find(r->grader, err))) return err->code;
    return credit_check(r->credit, err);
}

/* questions */

static int topic_init(const struct debate_request *r, struct debate_questions *q,
                      struct error *err) {
    const struct strings *choices = &r->choices;
    if (choices->n == 1 || choices->n > EVAL_MAX_CHOICES)
        return error_set(err, ERR_USAGE, "--choices requires 2 to %d answers", EVAL_MAX_CHOICES);
    q->n = 1;
    q->topic = xcalloc(1, sizeof *q->topic);
    *q->topic =
        (struct task_item){.question = xstrdup(r->topic), .n_choices = choices->n, .correct = -1};
    for (int i = 0; i < choices->n; i++) q->topic->choices[i] = xstrdup(choices->v[i]);
    return OK;
}

int debate_questions_open(const struct debate_request *r, struct debate_questions *q,
                          struct error *err) {
    const struct eval_task_options o = {.dir = r->data,
                                        .n = r->n,
                                        .shots = r->shots,
                                        .split = SPLIT_TEST,
                                        .seed = (uint64_t)r->seed};
    *q = (struct debate_questions){0};
    if (!r->topic == !r->tasks)
        return error_set(err, ERR_USAGE, "give one of --topic TEXT and --tasks LIST");
    if (r->topic && (r->data || r->shots))
        return error_set(err, ERR_USAGE, "--%s is for --tasks", r->data ? "data" : "shots");
    if (r->topic) return topic_init(r, q, err);
    if (r->grader || r->choices.n)
        return error_set(err, ERR_USAGE, "--%s is for --topic; tasks have their own",
                         r->grader ? "grader" : "choices");
    int rc = eval_tasks_open(r->tasks, &o, &q->tasks, &q->n_tasks, err);
    for (int i = 0; i < q->n_tasks; i++) q->n += q->tasks[i].n_questions;
    return rc;
}

void debate_questions_release(struct debate_questions *q) {
    for (int i = 0; i < q->n_tasks; i++) eval_task_release(&q->tasks[i]);
    free(q->tasks);
    if (q->topic) task_item_release(q->topic);
    free(q->topic);
}

/* running */

/* Opens the check of the request, if it has one, for these items. */
static int request_check_open(const struct debate_request *r, const struct task_item *items,
                              const struct check_model *model, struct check **out,
                              struct error *err) {
    const struct check_options o = {.sandbox = r->check_sandbox, .model = model};
    if (!r->check) return OK;
    if (items[0].n_choices)
        return error_set(err, ERR_USAGE, "--check requires generated answers: add --free-answers");
    *out = check_open_filter(r->check, &o, err);
    return *out ? OK : err->code;
}

json_t *debate_request_run_task(const struct debate_request *r, const struct llm_client *client,
                                const struct team *t, const struct eval_task *task,
                                struct error *err) {
    struct debate_options o;
    struct progress bar;
    if (debate_options_for_task(task, &t->options, &o, err) != OK) return NULL;
    if (r->free_answers && !o.grader && !(o.grader = grader_find("exact", err))) return NULL;
    struct check_questioner questioner = {.client = *client, .agent = {.name = "base"}};
    const struct check_model model = check_questioner_as_model(&questioner);
    struct debate_report_options needs = {.name = task->name,
                                          .samples = (int)r->samples,
                                          .temperature = SAMPLE_TEMPERATURE,
                                          .max_tokens = o.max_tokens ? o.max_tokens : SAMPLE_TOKENS,
                                          .credit_debate = strcmp(r->credit, "debate") == 0,
                                          .credit_none = strcmp(r->credit, "none") == 0,
                                          .n_transcripts = MAX_TRANSCRIPTS,
                                          .check_samples = (int)r->check_samples,
                                          .check_passes = (int)r->passes,
                                          .questioner = &questioner};
    json_t *contaminated = team_contamination(t, task), *report = NULL;
    struct task_item *items = eval_task_items(task);
    for (int64_t i = 0; r->free_answers && i < task->n_questions; i++)
        task_item_make_free(&items[i]);
    int rc = request_check_open(r, items, &model, &needs.check, err);
    if (rc == OK)
        report = debate_report_run(client, t->v, t->n, items, (int)task->n_questions, &o, &needs,
                                   &bar, err);
    if (rc == OK) progress_finish(&bar, NULL);
    check_free(needs.check);
    task_items_release(items, task->n_questions);
    if (report && contaminated) json_object_set(report, "contaminated", contaminated);
    json_decref(contaminated);
    return report;
}
