/*
 * debate_request: the options of a debate, for the command and the library; the questions that they
 * describe; and the debate of a team on a task.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "swarm/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TRANSCRIPTS = 5, SAMPLE_TOKENS = 24 }; /* transcripts in a report */

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
    ROW("split", OPT_STRING, split, "test", 0, 0, "NAME",
        "split of generated questions: test, dev or train", JOB_ARG_TEXT),
    ROW("shots", OPT_INT, shots, "0", 0, 1000, "N",
        "few-shot examples, from the task's dev or train file"),
    ROW("protocol", OPT_STRING, protocol, NULL, 0, 0, "NAME",
        "built-in protocol (default brief), or a workflow file", JOB_ARG_BUILTIN_OR_PATH),
    ROW("rounds", OPT_INT, rounds, "-1", -1, 64, "N",
        "maximum rounds (-1: the protocol's); 0: check the arguments and exit"),
    ROW("separation", OPT_FLOAT, flock.separation, "-1", -1, FLOCK_MAX_COEFFICIENT, "X",
        "--protocol flock: coefficient of the rule that moves an agent's mix of adapters away from "
        "agents with near answers (-1: the protocol's)"),
    ROW("alignment", OPT_FLOAT, flock.alignment, "-1", -1, FLOCK_MAX_COEFFICIENT, "X",
        "--protocol flock: coefficient of the rule that moves it as the others moved (-1: the "
        "protocol's)"),
    ROW("cohesion", OPT_FLOAT, flock.cohesion, "-1", -1, FLOCK_MAX_COEFFICIENT, "X",
        "--protocol flock: coefficient of the rule that moves it toward agents with distant "
        "answers "
        "(-1: the protocol's)"),
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
    ROW("base", OPT_BOOL, base, "true", 0, 0, NULL,
        "--tasks: also measure the base model and, if agents have system prompts, the team without "
        "adapters"),
    ROW("sample-temperature", OPT_STRING, sample_temperature, "0.7", 0, 0, "X",
        "temperature of the samples of --samples and --check; auto: the best one of the best agent "
        "on N other questions, of the dev split",
        JOB_ARG_TEXT),
    ROW("tune-data", OPT_STRING, tune_data, NULL, 0, 0, "FILE",
        "--sample-temperature auto: questions instead of the dev split, which tasks from files do "
        "not have",
        JOB_ARG_BUILTIN_OR_PATH),
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

/* *out: the temperature, or -1 for "auto". */
static int sample_temperature_parse(const struct debate_request *r, float *out, struct error *err) {
    const char *text = r->sample_temperature;
    char *end;
    *out = -1;
    if (strcmp(text, "auto") == 0) return OK;
    if (r->tune_data)
        return error_set(err, ERR_USAGE, "--tune-data is for --sample-temperature auto");
    *out = (float)strtod(text, &end);
    if (end != text && !*end && *out >= 0 && *out <= 100) return OK;
    return error_set(err, ERR_USAGE,
                     "--sample-temperature is a number of 0 to 100, or auto, not '%s'", text);
}

/* Sets the rules of a flock if the request sets one of them. */
static int flock_apply(const struct debate_request *r, struct debate_options *o,
                       struct error *err) {
    const struct flock_rules *f = &r->flock;
    if (f->separation < 0 && f->alignment < 0 && f->cohesion < 0) return OK;
    if (!o->workflow || !workflow_has_flock(o->workflow))
        return error_set(err, ERR_USAGE,
                         "--separation, --alignment and --cohesion are for protocols with 'flock', "
                         "such as --protocol flock");
    o->flock = f;
    return OK;
}

int debate_request_apply(const struct debate_request *r, struct debate_options *o,
                         struct error *err) {
    float sample_temperature;
    if (sample_temperature_parse(r, &sample_temperature, err) != OK) return err->code;
    o->seed = (uint64_t)r->seed;
    o->chain_of_thought &= r->chain_of_thought;
    if (r->rounds > 0) o->rounds = (int)r->rounds;
    if (r->temperature >= 0) o->temperature = (float)r->temperature;
    if (r->max_tokens) o->max_tokens = (int32_t)r->max_tokens;
    if (r->seconds > 0) o->seconds = r->seconds;
    if (r->vote && !(o->vote = vote_parse(r->vote, err))) return err->code;
    if (r->grader && !(o->grader = grader_find(r->grader, err))) return err->code;
    if (flock_apply(r, o, err) != OK) return err->code;
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
    struct eval_task_options o = {
        .dir = r->data, .n = r->n, .shots = r->shots, .seed = (uint64_t)r->seed};
    *q = (struct debate_questions){0};
    if (!r->topic == !r->tasks)
        return error_set(err, ERR_USAGE, "give one of --topic TEXT and --tasks LIST");
    if (data_split_parse(r->split, &o.split, err) != OK) return err->code;
    if (r->topic && (r->data || r->shots || o.split != SPLIT_TEST))
        return error_set(err, ERR_USAGE, "--%s is for --tasks",
                         r->data    ? "data"
                         : r->shots ? "shots"
                                    : "split");
    if (r->topic) return topic_init(r, q, err);
    if (r->grader || r->choices.n)
        return error_set(err, ERR_USAGE, "--%s is for --topic; tasks have their own",
                         r->grader ? "grader" : "choices");
    int rc = eval_tasks_open(r->tasks, &o, &q->tasks, &q->n_tasks, err);
    for (int i = 0; i < q->n_tasks; i++) {
        q->n += q->tasks[i].n_questions;
        if (rc == OK && o.split != SPLIT_TEST && q->tasks[i].family < 0)
            rc = error_set(err, ERR_USAGE, "--split is for generated questions; '%s' has others",
                           q->tasks[i].name);
    }
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

/* Development items, on which the temperature of the samples is tuned. */
struct tuning_items {
    struct task_item *v; /* [n] */
    int64_t n;
    const struct grader *grader;
};

static struct task_item *items_open(const struct eval_task *task, bool free_answers) {
    struct task_item *items = eval_task_items(task);
    for (int64_t i = 0; free_answers && i < task->n_questions; i++) task_item_make_free(&items[i]);
    return items;
}

static char *item_identity(const struct task_item *it) {
    return xasprintf("%s\n%s", it->question,
                     it->n_choices ? it->choices[MAX(it->correct, 0)] : it->gold);
}

/* Refuses development items of which the measured items contain any. */
static int tuning_check_overlap(const struct tuning_items *t, const struct task_item *items,
                                int64_t n, const char *name, struct error *err) {
    json_t *measured = json_object();
    int64_t n_equal = 0;
    for (int64_t i = 0; i < n; i++) {
        char *key = item_identity(&items[i]);
        json_object_set_new_nocheck(measured, key, json_true());
        free(key);
    }
    for (int64_t i = 0; i < t->n; i++) {
        char *key = item_identity(&t->v[i]);
        n_equal += json_object_get(measured, key) != NULL;
        free(key);
    }
    json_decref(measured);
    if (n_equal == 0) return OK;
    return error_set(err, ERR_USAGE,
                     "%lld questions that would tune the temperature of samples are also measured "
                     "in '%s'; name others with --tune-data",
                     (long long)n_equal, name);
}

/* Opens the development items of a task whose measured items are items[n_questions]. */
static int tuning_items_open(const struct debate_request *r, const struct team *t,
                             const struct eval_task *task, const struct task_item *items,
                             struct tuning_items *out, struct error *err) {
    const struct eval_task_options eo = {.dir = r->tune_data ? NULL : r->data,
                                         .n = r->n,
                                         .shots = r->shots,
                                         .split = SPLIT_DEV,
                                         .seed = (uint64_t)r->seed};
    struct eval_task dev;
    struct debate_options o;
    bool has_reasoning = t->options.chain_of_thought || items[0].n_choices == 0;
    if (!has_reasoning || (r->samples == 0 && !r->check))
        return error_set(err, ERR_USAGE,
                         "'%s' has no samples whose temperature could be tuned; leave out "
                         "--sample-temperature, or add --free-answers and --samples",
                         task->name);
    if (task->family < 0 && !r->tune_data)
        return error_set(err, ERR_USAGE,
                         "'%s' is read from files, which have no dev split; name other questions "
                         "with --tune-data",
                         task->name);
    int rc = eval_task_open(&dev, r->tune_data ? r->tune_data : task->name, &eo, err);
    if (rc == OK) rc = debate_options_for_task(&dev, &t->options, &o, err);
    if (rc == OK) {
        *out = (struct tuning_items){items_open(&dev, r->free_answers), dev.n_questions, o.grader};
        rc = tuning_check_overlap(out, items, task->n_questions, task->name, err);
    }
    eval_task_release(&dev);
    return rc;
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
                                          .base = r->base,
                                          .max_tokens = o.max_tokens ? o.max_tokens : SAMPLE_TOKENS,
                                          .credit_debate = strcmp(r->credit, "debate") == 0,
                                          .credit_none = strcmp(r->credit, "none") == 0,
                                          .n_transcripts = MAX_TRANSCRIPTS,
                                          .check_samples = (int)r->check_samples,
                                          .check_passes = (int)r->passes,
                                          .questioner = &questioner};
    json_t *contaminated = team_contamination(t, task), *report = NULL;
    struct task_item *items = items_open(task, r->free_answers);
    struct tuning_items tuning = {0};
    int rc = sample_temperature_parse(r, &needs.temperature, err);
    if (rc == OK) rc = request_check_open(r, items, &model, &needs.check, err);
    if (rc == OK && needs.temperature < 0) rc = tuning_items_open(r, t, task, items, &tuning, err);
    needs.tuning_items = tuning.v;
    needs.n_tuning = (int)tuning.n;
    needs.tuning_grader = tuning.grader ? tuning.grader : o.grader;
    if (rc == OK)
        report = debate_report_run(client, t->v, t->n, items, (int)task->n_questions, &o, &needs,
                                   &bar, err);
    if (rc == OK) progress_finish(&bar, NULL);
    check_free(needs.check);
    task_items_release(items, task->n_questions);
    task_items_release(tuning.v, tuning.n);
    if (report && contaminated) json_object_set(report, "contaminated", contaminated);
    json_decref(contaminated);
    return report;
}
