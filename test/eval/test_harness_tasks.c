/*
 * test_harness_tasks: task files of lm-evaluation-harness. The files are written after its own
 * (arc_easy, hellaswag, gsm8k, lambada_openai, boolq, winogrande, triviaqa); the expected prompts
 * are made by hand from its rules: description, then examples of context, target_delimiter, answer
 * and fewshot_delimiter, then the context.
 */
/* levels: once */
#define _GNU_SOURCE
#include "eval/eval.h"
#include "eval/harness_task.h"
#include "fixture.h"
#include "grade/grade.h"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

enum { LEN = 512 };
static struct error err;
static char dir[] = "/tmp/shoal-harness-XXXXXX";

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    char *command = xasprintf("rm -rf '%s'", dir);
    int rc = system(command);
    free(command);
    return rc;
}

/* Writes a file below the folder; returns its path. */
static char *file_put(const char *name, const char *text) {
    char *path = path_join(dir, name), *folder = xstrdup(path);
    *strrchr(folder, '/') = 0;
    if (dir_make(folder, &err) != OK || file_write(path, text, strlen(text), &err) != OK)
        fail_msg("%s", err.text);
    free(folder);
    return path;
}

static void put(const char *name, const char *text) {
    free(file_put(name, text));
}

/* Opens the task of a file below the folder, with `data` below it too, or NULL. */
static void task_open(struct eval_task *b, const char *name, const char *data, int64_t shots) {
    char *path = path_join(dir, name), *data_path = data ? path_join(dir, data) : NULL;
    const struct eval_task_options o = {.dir = data_path, .shots = shots};
    const struct grader *g;
    if (eval_task_open(b, path, &o, &err) != OK || eval_task_grader(b, &g, &err) != OK)
        fail_msg("%s: %s", name, err.text);
    free(path);
    free(data_path);
}

/* The whole prompt of question i. */
static void prompt_check(const struct eval_task *b, int64_t i, const char *want) {
    const struct eval_question *q = &b->questions[i];
    char *prompt = xasprintf("%s%s", b->subjects[q->subject].preamble, q->context);
    assert_string_equal(prompt, want);
    free(prompt);
}

static void options_check(const struct eval_question *q, int correct, const char *const *want) {
    int n = 0;
    for (; want[n]; n++) assert_string_equal(q->options[n], want[n]);
    assert_int_equal(q->n, n);
    assert_int_equal(q->correct, correct);
}
#define OPTIONS(q, correct, ...) options_check(q, correct, (const char *const[]){__VA_ARGS__, NULL})

/* multiple choice */

static const char arc_yaml[] =
    "tag:\n  - ai2_arc\n"
    "task: arc_tiny\n"
    "dataset_path: allenai/ai2_arc\n"
    "dataset_name: ARC-Easy\n"
    "output_type: multiple_choice\n"
    "training_split: train\nvalidation_split: validation\ntest_split: test\n"
    "doc_to_text: \"Question: {{question}}\\nAnswer:\"\n"
    "doc_to_target: \"{{choices.label.index(answerKey)}}\"\n"
    "doc_to_choice: \"{{choices.text}}\"\n"
    "should_decontaminate: true\n"
    "doc_to_decontamination_query: \"Question: {{question}}\\nAnswer:\"\n"
    "metric_list:\n"
    "  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    "  - metric: acc_norm\n    aggregation: mean\n    higher_is_better: true\n"
    "metadata:\n  version: 1.0\n";
static const char arc_test[] =
    "{\"question\": \"Which is hottest?\", \"choices\": {\"text\": [\"ice\", \"a dog's "
    "\\\"bed\\\"\", "
    "\"steam\"], \"label\": [\"A\", \"B\", \"C\"]}, \"answerKey\": \"C\"}\n"
    "{\"question\": \"水は？\", \"choices\": {\"text\": [\"氷\", \"it's\\nhot\"], \"label\": "
    "[\"1\", "
    "\"2\"]}, \"answerKey\": \"1\"}\n";
static const char arc_train[] =
    "{\"question\": \"T1?\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"A\", \"B\"]}, "
    "\"answerKey\": \"B\"}\n"
    "{\"question\": \"T2?\", \"choices\": {\"text\": [\"z\", \"w\"], \"label\": [\"A\", \"B\"]}, "
    "\"answerKey\": \"A\"}\n";

/* A data set of the hub: its rows are in the folder or the file of --data. */
static void test_arc(void **state) {
    (void)state;
    struct eval_task b;
    put("arc.yaml", arc_yaml);
    put("data/arc_tiny/test.jsonl", arc_test);
    put("data/arc_tiny/train.jsonl", arc_train);
    task_open(&b, "arc.yaml", "data", 0);
    assert_string_equal(b.name, "arc_tiny");
    assert_string_equal(b.form, "lm-evaluation-harness, multiple_choice");
    assert_string_equal(b.delimiter, " ");
    assert_true(b.reports_acc_norm);
    assert_int_equal(b.n_questions, 2);
    prompt_check(&b, 0, "Question: Which is hottest?\nAnswer:");
    OPTIONS(&b.questions[0], 2, "ice", "a dog's \"bed\"", "steam");
    OPTIONS(&b.questions[1], 0, "氷", "it's\nhot");
    eval_task_release(&b);
    task_open(&b, "arc.yaml", "data", 2);
    prompt_check(&b, 0,
                 "Question: T1?\nAnswer: y\n\nQuestion: T2?\nAnswer: z\n\n"
                 "Question: Which is hottest?\nAnswer:");
    eval_task_release(&b);
    task_open(&b, "arc.yaml", "data/arc_tiny/test.jsonl",
              1); // a file: its first row is the example
    assert_int_equal(b.n_questions, 1);
    prompt_check(&b, 0, "Question: Which is hottest?\nAnswer: steam\n\nQuestion: 水は？\nAnswer:");
    eval_task_release(&b);
}

/* Columns instead of templates, local files, a file that includes another, other delimiters. */
static void test_hellaswag(void **state) {
    (void)state;
    struct eval_task b;
    put("h/_base_yaml", "dataset_path: json\n"
                        "dataset_kwargs:\n"
                        "  data_files: {validation: rows.jsonl, train: [more.jsonl]}\n"
                        "output_type: multiple_choice\n"
                        "validation_split: train\n"
                        "training_split: train\n"
                        "test_split: train\n"
                        "doc_to_text: \"{{query}}\"\n"
                        "doc_to_target: \"{{label}}\"\n"
                        "doc_to_choice: choices\n"
                        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n  - metric: mcc\n");
    put("h/own.yaml", "include: _base_yaml\ntask: hella_tiny\ntest_split: null\n"
                      "validation_split: validation\ndescription: \"Finish it {subject}.\\n\"\n"
                      "num_fewshot: 1\ntarget_delimiter: \"\"\nfewshot_delimiter: \"\\n##\\n\"\n");
    put("h/rows.jsonl",
        "{\"query\": \"Baking: A bowl. A cook \", \"choices\": [\"stirs.\", \"swims.\"], "
        "\"label\": \"0\"}\n");
    put("h/more.jsonl", "{\"query\": \"Run:\", \"choices\": [\"a\", \"b\"], \"label\": 1}\n");
    task_open(&b, "h/own.yaml", NULL, 0);
    assert_string_equal(b.name, "hella_tiny");
    assert_string_equal(b.delimiter, "");
    assert_int_equal(b.n_questions, 1);
    prompt_check(&b, 0, "Finish it {subject}.\nRun:b\n##\nBaking: A bowl. A cook ");
    OPTIONS(&b.questions[0], 0, "stirs.", "swims.");
    eval_task_release(&b);
}

static const char boolq_yaml[] =
    "task: boolq_tiny\n"
    "dataset_path: csv\n"
    "dataset_kwargs: {data_files: rows.csv}\n"
    "output_type: multiple_choice\n"
    "training_split: train\n"
    "validation_split: validation\n"
    "doc_to_text: \"{{passage}}\\nQuestion: {{question}}?\\nAnswer:\"\n"
    "doc_to_target: label\n"
    "doc_to_choice: [\"no\", \"yes\"]\n"
    "metric_list:\n  - metric: acc\n";

static void test_boolq(void **state) {
    (void)state;
    struct eval_task b;
    put("b/boolq.yaml", boolq_yaml);
    put("b/rows.csv", "passage,question,label\n\"Ice, in water, floats.\",does ice float,1\n"
                      "007,is it a number,0\n");
    task_open(&b, "b/boolq.yaml", NULL, 0);
    assert_false(b.reports_acc_norm);
    assert_int_equal(b.n_questions, 2);
    prompt_check(&b, 0, "Ice, in water, floats.\nQuestion: does ice float?\nAnswer:");
    OPTIONS(&b.questions[0], 1, "no", "yes");
    prompt_check(&b, 1, "007\nQuestion: is it a number?\nAnswer:");
    OPTIONS(&b.questions[1], 0, "no", "yes");
    assert_int_equal(b.questions[1].line, 3);
    eval_task_release(&b);
}

/* doc_to_text is the number of a choice: the choices are contexts of the same target. */
static void test_winogrande(void **state) {
    (void)state;
    struct eval_task b;
    put("w/wino.yaml", "task: wino\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
                       "test_split: train\noutput_type: multiple_choice\n"
                       "doc_to_text: \"{{answer | int - 1}}\"\n"
                       "doc_to_choice: \"{{[sentence.split('_')[0] + option1, "
                       "sentence.split('_')[0] + option2]}}\"\n"
                       "doc_to_target: \"{{sentence.split('_')[1].strip()}}\"\n"
                       "metric_list:\n  - metric: acc\n");
    put("w/rows.jsonl", "{\"sentence\": \"For _ is big.\", \"option1\": \"the cup\", \"option2\": "
                        "\"the box\", \"answer\": \"2\"}\n"
                        "{\"sentence\": \"So _ ran.\", \"option1\": \"Ann\", \"option2\": \"Bob\", "
                        "\"answer\": \"1\"}\n");
    task_open(&b, "w/wino.yaml", NULL, 0);
    const struct eval_question *q = &b.questions[0];
    assert_string_equal(q->contexts[0], "For the cup");
    assert_string_equal(q->contexts[1], "For the box");
    OPTIONS(q, 1, "is big.", "is big.");
    eval_task_release(&b);
    task_open(&b, "w/wino.yaml", NULL, 1);
    assert_string_equal(b.subjects[0].preamble, "For the box is big.\n\n");
    assert_int_equal(b.questions[0].correct, 0);
    eval_task_release(&b);
}

/* generated answers */

/* The verdict of a whole text of a model, as evaluate.c decides it: 1, 0, or -1 without an answer.
 */
static int verdict(const struct eval_task *b, const char *text) {
    const struct eval_question *q = &b->questions[0];
    const struct grader *g = grader_find(b->grader, &err);
    struct buf answer = {0};
    buf_puts(&answer, "");
    bool found = answer_filter_apply(b->filter, text, &answer),
         right =
             grader_grade(g, answer.data, (const char *const *)&q->answer, 1).score == 1 ||
             grader_grade(g, answer.data, (const char *const *)q->aliases.v, q->aliases.n).score ==
                 1;
    buf_release(&answer);
    return right ? 1 : found ? 0 : -1;
}

static const char gsm8k_yaml[] =
    "tag:\n  - math_word_problems\n"
    "task: gsm_tiny\n"
    "dataset_path: json\ndataset_kwargs: {data_files: {test: t.jsonl, train: s.jsonl}}\n"
    "output_type: generate_until\n"
    "training_split: train\nfewshot_split: train\ntest_split: test\n"
    "doc_to_text: \"Question: {{question}}\\nAnswer:\"\n"
    "doc_to_target: \"{{answer}}\"\n"
    "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    "    ignore_case: true\n    ignore_punctuation: false\n"
    "    regexes_to_ignore:\n      - \",\"\n      - \"\\\\$\"\n      - \"(?s).*#### \"\n"
    "      - \"\\\\.$\"\n"
    "generation_kwargs:\n  until:\n    - \"Question:\"\n    - \"</s>\"\n    - \"<|im_end|>\"\n"
    "  do_sample: false\n  temperature: 0.0\n"
    "repeats: 1\nnum_fewshot: 2\n"
    "filter_list:\n";
static const char strict_filter[] = "  - name: \"strict-match\"\n    filter:\n"
                                    "      - function: \"regex\"\n"
                                    "        regex_pattern: \"#### (\\\\-?[0-9\\\\.\\\\,]+)\"\n"
                                    "      - function: \"take_first\"\n";
static const char flexible_filter[] = "  - name: \"flexible-extract\"\n    filter:\n"
                                      "      - function: \"regex\"\n        group_select: -1\n"
                                      "        regex_pattern: \"(-?[$0-9.,]{2,})|(-?[0-9]+)\"\n"
                                      "      - function: \"take_first\"\n";

static void gsm8k_put(const char *first, const char *second) {
    char *text = xasprintf("%s%s%s", gsm8k_yaml, first, second);
    put("g/gsm.yaml", text);
    free(text);
}

static void test_gsm8k(void **state) {
    (void)state;
    struct eval_task b;
    put("g/t.jsonl", "{\"question\": \"600 + 634?\", \"answer\": \"It is <<600+634=1234>>1234.\\n"
                     "#### 1,234\"}\n");
    put("g/s.jsonl", "{\"question\": \"1 + 1?\", \"answer\": \"Two.\\n#### 2\"}\n"
                     "{\"question\": \"2 + 1?\", \"answer\": \"#### 3\"}\n");
    gsm8k_put(strict_filter, flexible_filter);
    task_open(&b, "g/gsm.yaml", NULL, 0);
    assert_int_equal(b.output_type, EVAL_GENERATE);
    assert_string_equal(b.grader, "verbatim");
    assert_int_equal(b.max_tokens, 256);
    assert_int_equal(b.stops.n, 3);
    assert_string_equal(b.stops.v[2], "<|im_end|>");
    assert_string_equal(b.questions[0].answer, "1234");
    prompt_check(&b, 0,
                 "Question: 1 + 1?\nAnswer: Two.\n#### 2\n\n"
                 "Question: 2 + 1?\nAnswer: #### 3\n\nQuestion: 600 + 634?\nAnswer:");
    assert_int_equal(verdict(&b, " So it is 1234.\n#### 1,234"), 1);
    assert_int_equal(verdict(&b, " #### 1234."), 1);
    assert_int_equal(verdict(&b, " #### 1234 #### 5"), 1); // the first match
    assert_int_equal(verdict(&b, " #### 12345"), 0);
    assert_int_equal(verdict(&b, " The answer is 1234."), -1);
    char hash[HASH_LEN], other[HASH_LEN];
    eval_task_hash(&b, hash);
    eval_task_release(&b);
    gsm8k_put(flexible_filter, strict_filter);
    task_open(&b, "g/gsm.yaml", NULL, 0);
    assert_int_equal(verdict(&b, " The answer is 1234."), 1);
    assert_int_equal(verdict(&b, " 1234, not 7"), 0); // the last match
    assert_int_equal(verdict(&b, " about $1,234"), 1);
    assert_int_equal(verdict(&b, " many"), -1);
    eval_task_hash(&b, other);
    assert_string_not_equal(hash, other); // the filter decides grades
    eval_task_release(&b);
}

/* Examples in the file itself, with other columns than the data. */
static void test_samples(void **state) {
    (void)state;
    struct eval_task b;
    put("c/cot.yaml",
        "task: cot\ndataset_path: json\ndataset_kwargs: {data_files: t.json}\n"
        "output_type: generate_until\ntest_split: test\n"
        "doc_to_text: 'Q: {{question}}\n\n  A:'\n"
        "doc_to_target: '{{answer.split(''####'')[-1].strip() if answer is defined else target}}'\n"
        "fewshot_config:\n  sampler: first_n\n  samples:\n"
        "  - {question: One?, target: The answer is 1.}\n"
        "  - {question: Two?, target: The answer is 2.}\n"
        "num_fewshot: 2\ngeneration_kwargs: {until: [\"Q:\"], do_sample: false, max_gen_toks: 32}\n"
        "filter_list:\n- name: strict-match\n  filter:\n  - function: regex\n"
        "    regex_pattern: The answer is (\\-?[0-9\\.\\,]+).\n  - function: take_first\n");
    put("c/t.json", "[{\"question\": \"Three?\", \"answer\": \"x #### 3\"}]");
    task_open(&b, "c/cot.yaml", NULL, 0);
    prompt_check(&b, 0,
                 "Q: One?\nA: The answer is 1.\n\nQ: Two?\nA: The answer is 2.\n\n"
                 "Q: Three?\nA:");
    assert_string_equal(b.questions[0].answer, "3");
    assert_int_equal(b.max_tokens, 32);
    assert_int_equal(verdict(&b, " The answer is 3."), 1);
    eval_task_release(&b);
}

/* A list of right answers; without generation_kwargs a text ends at fewshot_delimiter. */
static void test_triviaqa(void **state) {
    (void)state;
    struct eval_task b;
    put("q/trivia.yaml", "task: trivia\ndataset_path: json\ndataset_kwargs: {data_files: t.jsonl}\n"
                         "output_type: generate_until\nvalidation_split: v\n"
                         "doc_to_text: \"Question: {{question}}?\\nAnswer:\"\ndoc_to_target: "
                         "\"{{answer.aliases}}\"\n"
                         "filter_list:\n  - name: remove_whitespace\n    filter:\n"
                         "      - function: remove_whitespace\n      - function: take_first\n"
                         "metric_list:\n  - metric: exact_match\n    ignore_case: true\n"
                         "    ignore_punctuation: true\n");
    put("q/t.jsonl", "{\"question\": \"Who\", \"answer\": {\"aliases\": [\"David Seville\", \"R. "
                     "O'Neil\"]}}\n");
    task_open(&b, "q/trivia.yaml", NULL, 0);
    assert_string_equal(b.questions[0].answer, "david seville");
    assert_int_equal(b.questions[0].aliases.n, 1);
    assert_string_equal(b.stops.v[0], "\n\n");
    assert_int_equal(verdict(&b, " r o'neil.\n"), 1);
    assert_int_equal(verdict(&b, " David"), 0);
    eval_task_release(&b);
}

/* continuations */

static void test_lambada(void **state) {
    (void)state;
    struct eval_task b;
    put("l/lambada.yaml",
        "tag:\n  - lambada\ntask: lambada_tiny\ndataset_path: json\n"
        "dataset_kwargs: {data_files: t.jsonl}\noutput_type: loglikelihood\ntest_split: test\n"
        "doc_to_text: \"{{text.split(' ')[:-1]|join(' ')}}\"\n"
        "doc_to_target: \"{{' '+text.split(' ')[-1]}}\"\n"
        "metric_list:\n  - metric: perplexity\n    aggregation: perplexity\n  - metric: acc\n");
    put("l/t.jsonl", "{\"text\": \"She saw the dog\"}\n{\"text\": \"I don't care about signs\"}\n");
    task_open(&b, "l/lambada.yaml", NULL, 0);
    assert_string_equal(b.grader, "prefix");
    assert_int_equal(b.n_questions, 2);
    prompt_check(&b, 1, "I don't care about");
    assert_string_equal(b.questions[1].answer, "signs");
    eval_task_release(&b);
    task_open(&b, "l/lambada.yaml", NULL, 1); // the delimiter precedes the blank of the target
    prompt_check(&b, 0, "She saw the  dog\n\nI don't care about");
    eval_task_release(&b);
}

/* scores of a model */

/* Results of the task files for the same questions as a built-in task, and of a filter. */
static void results_compute(struct model *m, const struct eval_task *b, struct eval_result *out) {
    struct pool *pool = pool_new(1);
    struct engine_options o = {.max_rows = 64, .max_seqs = 8, .max_len = LEN, .pool = pool};
    struct engine *e = engine_new(m, &o, &err);
    struct eval_cost cost = {0};
    if (!e) fail_msg("%s", err.text);
    struct eval_solver s = {.e = e, .tok = m->tok, .max_len = LEN};
    if (eval_solver_answer(&s, b, out, &cost, NULL, 0, &err) != OK) fail_msg("%s", err.text);
    engine_free(e);
    pool_free(pool);
}

static struct model *model_make(void) {
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-qwen3", &c, &err), OK);
    c.max_seq_len = LEN;
    return fixture_model_of(c, false, TENSOR_F32, NUMERIC_EXACT);
}

static void test_scores(void **state) {
    (void)state;
    struct eval_task harness, builtin;
    struct eval_result a[2], b[2];
    struct model *m = model_make();
    const struct eval_task_options o = {0};
    char *path = file_put("data/arc_easy.jsonl", arc_test);
    task_open(&harness, "arc.yaml", "data/arc_easy.jsonl", 0);
    assert_int_equal(eval_task_open(&builtin, path, &o, &err), OK);
    results_compute(m, &harness, a);
    results_compute(m, &builtin, b);
    assert_memory_equal(a, b, sizeof a);
    eval_task_release(&harness);
    eval_task_release(&builtin);
    free(path);
    model_close(m);
}

/* The filter decides whether the text that a model generates is right. */
static void test_generated_scores(void **state) {
    (void)state;
    static const struct {
        const char *pattern, *gold;
        bool right, no_answer;
    } cases[] = {{"(?s)^.*$", "found", true, false},
                 {"(?s)^.*$", "other", false, false},
                 {"(?!)", "[invalid]", true, true}};
    struct model *m = model_make();
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct eval_task b;
        struct eval_result r;
        char *yaml = xasprintf(
            "task: t\ndataset_path: json\ndataset_kwargs: {data_files: one.jsonl}\n"
            "test_split: test\ndoc_to_text: question\ndoc_to_target: \"%s\"\n"
            "generation_kwargs: {until: [], max_gen_toks: 8}\n"
            "filter_list:\n- name: f\n  filter:\n  - {function: regex, regex_pattern: '%s'}\n"
            "  - {function: map, mapping_dict: {'[invalid]': '[invalid]'}, default_value: found}\n",
            cases[i].gold, cases[i].pattern);
        put("s/t.yaml", yaml);
        put("s/one.jsonl", "{\"question\": \"Which?\"}\n");
        task_open(&b, "s/t.yaml", NULL, 0);
        results_compute(m, &b, &r);
        assert_int_equal(r.right, cases[i].right);
        assert_int_equal(r.no_answer, cases[i].no_answer);
        assert_true(r.truncated);
        eval_task_release(&b);
        free(yaml);
    }
    model_close(m);
}

/* refusals */

static void test_refused(void **state) {
    (void)state;
    static const char base[] =
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: one.jsonl}\ntest_split: test\n"
        "doc_to_text: question\ndoc_to_target: answer\n";
    static const struct {
        const char *keys, *why;
    } cases[] = {
        {"process_docs: !function utils.f\n", "refused.yaml', line 7: 'process_docs': needs the "
                                              "Python code 'utils.f', which is not run; "
                                              "save the rows"},
        {"doc_to_choice: !function utils.g\n", "write a template, or add a column"},
        {"metric_list:\n  - metric: !function m.f\n", "'metric_list': needs the Python code 'm.f'"},
        {"metric_list:\n  - metric: bleu\n",
         "no metric of generate_until is computed; exact_match"},
        {"metric_list:\n  - metric: exact_match\n    ignore_hats: true\n",
         "no option 'ignore_hats'"},
        {"filter_list:\n  - name: f\n    filter:\n      - function: custom\n",
         "the filter 'custom' is not supported"},
        {"output_type: loglikelihood_rolling\n", "'loglikelihood_rolling' is not supported"},
        {"output_type: multiple_choice\n", "'doc_to_choice': is missing"},
        {"generation_kwargs: {do_sample: true}\n", "decoded greedily; set do_sample to false"},
        {"generation_kwargs: {num_beams: 4}\n", "'num_beams' is not supported"},
        {"repeats: 8\n", "'repeats': must be 1"},
        {"description: \"About {{subject}}.\"\n", "is a template"},
        {"gen_prefix: \"The\"\n", "append it to doc_to_text"},
        {"doc_to_texte: x\n", "'doc_to_texte': is an unknown key"},
        {"fewshot_config: {sampler: !function utils.S}\n", "list the examples"},
        {"unsafe_code: true\n", "executes no code"},
        {"include: missing.yaml\n", "missing.yaml"},
        {"include: refused.yaml\n", "includes a file that includes it"},
        {"validation_split: !custom x\n", "tags ('!name') are not accepted"},
    };
    put("refused/one.jsonl", "{\"question\": \"Which?\", \"answer\": \"x\"}\n");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct eval_task b;
        char *text = xasprintf("%s%s", base, cases[i].keys),
             *path = file_put("refused/refused.yaml", text);
        assert_true(eval_task_open(&b, path, &(struct eval_task_options){0}, &err) < 0);
        if (!strstr(err.text, cases[i].why)) fail_msg("%s: %s", cases[i].keys, err.text);
        eval_task_release(&b);
        free(path);
        free(text);
    }
}

/* Data that is not local, rows that lack a column, targets that name no choice, groups, LightEval.
 */
static void test_refused_data(void **state) {
    (void)state;
    static const struct {
        const char *name, *text, *rows, *why;
    } cases[] = {
        {"r/hub.yaml", arc_yaml, "", "'allenai/ai2_arc' is not downloaded; save its split 'test'"},
        {"r/key.yaml",
         "task: t\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
         "test_split: test\ndoc_to_text: \"{{frage}}\"\ndoc_to_target: a\n",
         "{\"question\": \"q\", \"a\": 1}\n",
         "rows.jsonl', line 1: 'doc_to_text': line 1: 'frage' is undefined"},
        {"r/column.yaml",
         "task: t\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
         "test_split: test\ndoc_to_text: question\ndoc_to_target: a\n",
         "{\"question\": \"q\", \"a\": 1}\n{\"a\": 1}\n",
         "line 2: 'doc_to_text': the column 'question' is missing"},
        {"r/target.yaml",
         "task: t\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
         "test_split: test\noutput_type: multiple_choice\ndoc_to_text: question\n"
         "doc_to_target: a\ndoc_to_choice: [x, y]\n",
         "{\"question\": \"q\", \"a\": 2}\n", "line 1: 'doc_to_target': '2' names none of the 2"},
        {"r/parquet.yaml",
         "task: t\ndataset_path: parquet\ndataset_kwargs: {data_files: rows.parquet}\n"
         "test_split: test\ndoc_to_text: question\ndoc_to_target: a\n",
         "", "'parquet' is not downloaded"},
        {"r/url.yaml",
         "task: t\ndataset_path: json\ndataset_kwargs: {data_files: 'https://x/y.jsonl'}\n"
         "test_split: test\ndoc_to_text: question\ndoc_to_target: a\n",
         "", "'https://x/y.jsonl' is not downloaded"},
        {"r/group.yaml", "group: g\ntask: [a, b]\n", "", "is a group of tasks"},
        {"lighteval|arc:challenge|25|0", NULL, NULL, "is a task of LightEval"},
        {"tasks.py", NULL, NULL, "is a task of LightEval"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct eval_task b;
        if (cases[i].rows) put("r/rows.jsonl", cases[i].rows);
        char *path =
            cases[i].text ? file_put(cases[i].name, cases[i].text) : xstrdup(cases[i].name);
        assert_true(eval_task_open(&b, path, &(struct eval_task_options){0}, &err) < 0);
        if (!strstr(err.text, cases[i].why)) fail_msg("%s: %s", cases[i].name, err.text);
        eval_task_release(&b);
        free(path);
    }
}

/* parts */

static void test_python_literals(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"['a', \"it's\", 'say \\'x\\'']", "[\"a\",\"it's\",\"say 'x'\"]"},
        {" ('a', 1, -2.5, True, None,) ", "[\"a\",1,-2.5,true,null]"},
        {"[['x'], (1)]", "[[\"x\"],1]"},
        {"['\\n\\u00e9\\x41\\d']", "[\"\\né"
                                   "A\\\\d\"]"},
        {"[]", "[]"},
        {"['a' 'b']", NULL},
        {"['a'", NULL},
        {"[x]", NULL},
        {"['a']]", NULL},
        {"", NULL},
        {"[1e999]", NULL},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        json_t *v = python_literal_parse(cases[i][0]);
        char *text = v ? json_canonical(v) : NULL;
        if (!text != !cases[i][1] || (text && strcmp(text, cases[i][1]) != 0))
            fail_msg("%s: %s", cases[i][0], text ? text : "(none)");
        free(text);
        json_decref(v);
    }
}

/* Results of Python's re.findall and re.sub. */
static void test_filters(void **state) {
    (void)state;
    static const struct {
        const char *steps, *text, *want;
        bool found;
    } cases[] = {
        {"[{\"step\":\"regex\",\"pattern\":\"[0-9]+\",\"group\":-1,\"fallback\":\"?\"}]",
         "a 1 b 22 c", "22", true},
        {"[{\"step\":\"regex\",\"pattern\":\"(x)|( y )\",\"group\":1,\"fallback\":\"?\"}]", "x y x",
         "y", true},
        {"[{\"step\":\"regex\",\"pattern\":\"(x)|(q*)\",\"group\":0,\"fallback\":\"?\"}]", "ab",
         "?", false},
        {"[{\"step\":\"regex\",\"pattern\":\"b*\",\"group\":1,\"fallback\":\"?\"}]", "abb", "bb",
         true},
        {"[{\"step\":\"regex\",\"pattern\":\"b*\",\"group\":2,\"fallback\":\"?\"}]", "abb", "",
         true},
        {"[{\"step\":\"regex\",\"pattern\":\"b\",\"group\":-2,\"fallback\":\"?\"}]", "ab", "?",
         false},
        {"[{\"step\":\"remove\",\"pattern\":\"[aeiou]|$\"}]", "a banana", " bnn", true},
        {"[{\"step\":\"strip\"},{\"step\":\"lower\"}]", "\n ÄB ", "äb", true},
        {"[{\"step\":\"upper\"},{\"step\":\"punctuation\"},{\"step\":\"digits\"}]", "a-1 (b)。",
         "A B。", true},
        {"[{\"step\":\"map\",\"map\":{\"A\":\"yes\"}}]", "B", "", false},
        {"[]", "x\xff", "x\xEF\xBF\xBD", true},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        json_t *steps = json_parse(cases[i].steps, strlen(cases[i].steps), "steps", &err);
        struct answer_filter *f = answer_filter_new(steps, &err);
        struct buf out = {0};
        if (!f) fail_msg("%s", err.text);
        bool found = answer_filter_apply(f, cases[i].text, &out);
        if (found != cases[i].found || strcmp(out.data, cases[i].want) != 0)
            fail_msg("%s of '%s': '%s', %d", cases[i].steps, cases[i].text, out.data, found);
        buf_release(&out);
        answer_filter_free(f);
    }
    assert_null(
        answer_filter_new(json_pack("[{s:s,s:s}]", "step", "remove", "pattern", "("), &err));
    assert_non_null(strstr(err.text, "pattern '(' is wrong"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arc),
        cmocka_unit_test(test_hellaswag),
        cmocka_unit_test(test_boolq),
        cmocka_unit_test(test_winogrande),
        cmocka_unit_test(test_gsm8k),
        cmocka_unit_test(test_samples),
        cmocka_unit_test(test_triviaqa),
        cmocka_unit_test(test_lambada),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_generated_scores),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_refused_data),
        cmocka_unit_test(test_python_literals),
        cmocka_unit_test(test_filters),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
