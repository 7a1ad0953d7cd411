/*
 * eval_request: the options that select the questions of an evaluation, for the command and the
 * library, and the tasks that they describe.
 */
#include "eval/eval.h"

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct eval_request, field), fallback, min, max, metavar, __VA_ARGS__ }
const struct option_row eval_request_rows[] = {
    ROW("tasks", OPT_STRING, tasks, "starter", 0, 0, "LIST",
        "tasks: names, JSONL files, recipes or lm-evaluation-harness's YAML, comma-separated",
        JOB_ARG_BUILTIN_OR_PATH_LIST),
    ROW("data", OPT_STRING, data, NULL, 0, 0, "DIR",
        "folder of the files of named tasks, or the file of a task of lm-evaluation-harness",
        JOB_ARG_INPUT_PATH),
    ROW("n", OPT_INT, n, "0", 0, 1e7, "N",
        "questions per task, sampled with the seed; 0: 1000 of a family, all of a file"),
    ROW("shots", OPT_INT, shots, "0", 0, 1000, "N",
        "few-shot examples, from the task's dev or train file"),
    ROW("split", OPT_STRING, split, "test", 0, 0, "NAME",
        "split of generated questions: test, dev or train", JOB_ARG_TEXT),
    ROW("seed", OPT_INT, seed, "1000003", 0, 9e15, "N", "seed of the choice of questions"),
    ROW("chain-of-thought", OPT_BOOL, chain_of_thought, NULL, 0, 0, NULL,
        "write a chain of thought before the answer (generated questions)"),
    {0},
};
#undef ROW

int eval_request_open(const struct eval_request *r, struct eval_task **tasks, int *n,
                      struct error *err) {
    struct eval_task_options o = {
        .dir = r->data, .n = r->n, .shots = r->shots, .seed = (uint64_t)r->seed};
    if (data_split_parse(r->split, &o.split, err) != OK ||
        eval_tasks_open(r->tasks, &o, tasks, n, err) != OK)
        return err->code;
    for (int i = 0; i < *n; i++)
        if ((*tasks)[i].family < 0 && (r->chain_of_thought || o.split != SPLIT_TEST))
            return error_set(err, ERR_USAGE, "--%s is for generated questions; '%s' has others",
                             r->chain_of_thought ? "chain-of-thought" : "split", (*tasks)[i].name);
    return OK;
}
