/*
 * test_tasks: questions from files in all their formats, scored like lm-evaluation-harness.
 *
 * The parsed form of each format's lines is in test/cases/tasks.txt. Scores are compared with sums
 * of prompt_logprobs over whole sequences that this test encodes, which is another path through the
 * engine.
 */
#define _GNU_SOURCE
#include "eval/eval.h"
#include "fixture.h"
#include "grade/grade.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

enum { LEN = 512 };
static struct error err;
static struct model *model;
static char dir[] = "/tmp/shoal-tasks-XXXXXX";

static int set_up(void **state) {
    (void)state;
    struct model_config c;
    log_quiet = true;
    if (model_preset_find("tiny-qwen3", &c, &err) != OK) return -1;
    c.max_seq_len = LEN; // each byte is a token
    model = fixture_model_of(c, false, TENSOR_F32, NUMERIC_EXACT);
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    model_close(model);
    char *command = xasprintf("rm -rf '%s'", dir);
    int rc = system(command);
    free(command);
    return rc;
}

static void close_to(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.9g is not %.9g ± %.1g", got, want, tolerance);
}

static char *file_put(const char *name, const char *text) {
    char *path = path_join(dir, name), *folder = xstrdup(path);
    *strrchr(folder, '/') = 0;
    if (dir_make(folder, &err) != OK || file_write(path, text, strlen(text), &err) != OK)
        fail_msg("%s", err.text);
    free(folder);
    return path;
}

static void file_remove(const char *name) {
    char *path = path_join(dir, name);
    unlink(path);
    free(path);
}

static void check_ok(int rc) {
    if (rc != OK) fail_msg("%s", err.text);
}

/* cases */

static void unescape(char *s) {
    char *to = s;
    for (; *s; s++) *to++ = s[0] == '\\' && s[1] == 'n' ? (s++, '\n') : *s;
    *to = 0;
}

struct expected {
    char *task, *json, *shows, *answer, *alias, *grader, *form, *example, *refused,
        *options[EVAL_MAX_OPTIONS];
    int n, correct, line, n_json; /* json: the lines of the file, [n_json] */
};

static void options_check(const struct expected *x, const struct eval_question *q) {
    assert_int_equal(q->n, x->n);
    for (int i = 0; i < x->n; i++) {
        char *own = q->contexts[i] ? xasprintf("%s => %s", q->contexts[i], q->options[i])
                                   : xstrdup(q->options[i]);
        if (strcmp(own, x->options[i]) != 0)
            fail_msg("line %d: option '%s', not '%s'", x->line, own, x->options[i]);
        free(own);
    }
    if (x->n) assert_int_equal(q->correct, x->correct);
}

static void text_check(const struct expected *x, const char *what, const char *got,
                       const char *want) {
    if (want && (!got || strcmp(got, want) != 0))
        fail_msg("line %d: %s '%s', not '%s'", x->line, what, got ? got : "(none)", want);
}

static void shown_check(const struct expected *x, const struct eval_task *b) {
    const struct eval_question *q = &b->questions[0];
    char *shown = xasprintf("%s%s", b->subjects[q->subject].preamble, q->context ? q->context : "");
    const char *shows = x->shows ? x->shows : "", *tail = shown;
    if (strncmp(shows, "...", 3) == 0) { // any beginning
        shows += 3;
        tail += strlen(shown) - MIN(strlen(shown), strlen(shows));
    }
    text_check(x, "prompt", tail, shows);
    free(shown);
}

/* An example is the text before the question of an unnamed file with two lines. */
static void example_check(const struct expected *x, const char *path) {
    struct eval_task b;
    if (!x->example) return;
    if (eval_task_open(&b, path, &(struct eval_task_options){.shots = 1}, &err) != OK)
        fail_msg("line %d: %s", x->line, err.text);
    assert_int_equal(b.n_questions, x->n_json - 1);
    text_check(x, "example", b.subjects[b.questions[0].subject].preamble, x->example);
    eval_task_release(&b);
}

static void case_check(const struct expected *x) {
    struct eval_task b;
    const struct grader *g;
    bool file = strchr(x->task, '.') != NULL;
    char *name = file ? xstrdup(x->task) : xasprintf("%s.jsonl", x->task),
         *path = file_put(name, x->json), *line = xasprintf("line %d", x->n_json);
    int rc =
        eval_task_open(&b, file ? path : x->task, &(struct eval_task_options){.dir = dir}, &err);
    if (x->refused) {
        assert_true(rc < 0);
        if (!strstr(err.text, x->refused) || !strstr(err.text, line))
            fail_msg("line %d: '%s'", x->line, err.text);
    } else {
        if (rc != OK || eval_task_grader(&b, &g, &err) != OK)
            fail_msg("line %d: %s", x->line, err.text);
        const struct eval_question *q = &b.questions[0];
        shown_check(x, &b);
        options_check(x, q);
        text_check(x, "answer", q->answer, x->answer);
        text_check(x, "alias", q->aliases.n ? q->aliases.v[0] : NULL, x->alias);
        text_check(x, "grader", b.grader, x->grader);
        text_check(x, "form", b.form, x->form);
        example_check(x, path);
    }
    eval_task_release(&b);
    unlink(path);
    free(line);
    free(path);
    free(name);
}

/* The field of `x` that a line of the file begins with; NULL: none. *text: its value. */
static char **case_field(struct expected *x, char *line, char **text) {
    const struct {
        const char *word;
        char **field;
    } fields[] = {{"shows ", &x->shows},    {"answer ", &x->answer}, {"alias ", &x->alias},
                  {"form ", &x->form},      {"grader ", &x->grader}, {"example ", &x->example},
                  {"refused ", &x->refused}};
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        if (strncmp(line, fields[i].word, strlen(fields[i].word)) == 0) {
            *text = line + strlen(fields[i].word);
            return fields[i].field;
        }
    return NULL;
}

static void case_line(struct expected *x, char *line, int n) {
    char **field, *text, *lines;
    if (strncmp(line, "task ", 5) == 0) {
        if (x->task) case_check(x);
        free(x->json);
        *x = (struct expected){.task = line + 5, .line = n};
        return;
    }
    if (*line == '{' || *line == '[') {
        lines = xasprintf("%s%s\n", x->json ? x->json : "", line);
        free(x->json);
        x->json = lines;
        x->n_json++;
        return;
    }
    unescape(line);
    if ((field = case_field(x, line, &text)) != NULL) {
        *field = text;
    } else if ((*line == '-' || *line == '*') && line[1] == ' ') {
        if (*line == '*') x->correct = x->n;
        x->options[x->n++] = line + 2;
    } else {
        fail_msg("test/cases/tasks.txt, line %d: '%s'", n, line);
    }
}

static void test_cases(void **state) {
    (void)state;
    struct buf file = {0};
    struct expected x = {0};
    int n_line = 0;
    check_ok(file_read("test/cases/tasks.txt", 1 << 20, &file, &err));
    for (char *rest = file.data, *line; (line = strsep(&rest, "\n")) != NULL;) {
        n_line++;
        if (*line && *line != '#') case_line(&x, line, n_line);
    }
    case_check(&x);
    free(x.json);
    assert_true(n_line > 450);
    buf_release(&file);
}

/* the forms of docs/EVALUATION.md */

/* Checks that the lines of a documented form have it, and that the first prompt ends as shown. */
static void documented_form_check(const char *name, const char *lines, const char *prompt) {
    struct eval_task b;
    char *path = file_put("form.jsonl", lines);
    const struct grader *g;
    if (eval_task_open(&b, path, &(struct eval_task_options){0}, &err) != OK ||
        eval_task_grader(&b, &g, &err) != OK)
        fail_msg("%s: %s", name, err.text);
    const struct eval_question *q = &b.questions[0];
    char *shown = xasprintf("%s%s\n", b.subjects[q->subject].preamble,
                            q->context ? q->context : q->contexts[0]);
    assert_string_equal(b.form, name);
    assert_int_equal(b.n_questions, 3);
    if (prompt && (strlen(prompt) > strlen(shown) ||
                   strcmp(shown + strlen(shown) - strlen(prompt), prompt) != 0))
        fail_msg("%s: the prompt is '%s', not '%s'", name, shown, prompt);
    eval_task_release(&b);
    free(shown);
    free(path);
}

/* Cuts the block that begins with "```TAG\n" from s; NULL: there is none before the next heading.
 */
static char *block_cut(char *s, const char *tag) {
    char *mark = xasprintf("\n```%s\n", tag), *heading = strstr(s, "\n#"), *block = strstr(s, mark);
    if (block && heading && heading < block) block = NULL;
    if (block)
        block = xasprintf(
            "%.*s",
            (int)(strstr(block + strlen(mark), "\n```") + 1 - block - (ptrdiff_t)strlen(mark)),
            block + strlen(mark));
    free(mark);
    return block;
}

static void test_documented_forms(void **state) {
    (void)state;
    struct buf page = {0};
    int n = 0;
    check_ok(file_read("docs/EVALUATION.md", 1 << 20, &page, &err));
    for (char *s = page.data; (s = strstr(s, "\n### ")) != NULL; n++) {
        s += strlen("\n### ");
        char *name = xasprintf("%.*s", (int)strcspn(s, "\n"), s), *lines = block_cut(s, "json"),
             *prompt = block_cut(s, "text");
        if (!lines) fail_msg("%s: no file", name);
        documented_form_check(name, lines, prompt);
        free(name);
        free(lines);
        free(prompt);
    }
    assert_int_equal(n, 27); // every form of dataset_formats.c except HumanEval
    buf_release(&page);
}

/* CSV */

struct recorded_rows {
    int n, line;
    char *last;
};

static int row_record(void *ctx, const json_t *row, int line, struct error *e) {
    struct recorded_rows *s = ctx;
    (void)e;
    free(s->last);
    s->last = json_canonical(row);
    s->line = line;
    s->n++;
    return OK;
}

static void test_csv(void **state) {
    (void)state;
    static const struct {
        const char *text, *last, *refused;
        int n, line;
    } cases[] = {
        {"q,a,b,B\n", "{\"answer\":1,\"choices\":[\"a\",\"b\"],\"question\":\"q\"}", NULL, 1, 1},
        {"question,choice0,choice1,answer\r\nq,a,b,0\r\n",
         "{\"answer\":0,\"choices\":[\"a\",\"b\"],\"question\":\"q\"}", NULL, 1, 2},
        {"\"a \"\"b\"\",\nc\",x,y,A\n\nz,\"\",y,B",
         "{\"answer\":1,\"choices\":[\"\",\"y\"],\"question\":\"z\"}", NULL, 2, 4},
        {"\xEF\xBB\xBFq,a,b,A", "{\"answer\":0,\"choices\":[\"a\",\"b\"],\"question\":\"q\"}", NULL,
         1, 1},
        {"", NULL, NULL, 0, 0},
        {"q,a,b,A\nq,a,b,?\n", NULL, "line 2: answer '?' is neither", 1, 1},
        {"q,a,A\n", NULL, "line 1: 3 cells", 0, 0},
        {"q,a,b,A\n\"q,a,b,A\n", NULL, "line 2: a quote is not closed", 1, 1},
        {"\"q\"x,a,b,A\n", NULL, "line 1: text after a closing quote", 0, 0},
        {"q\ra,b,A\n", NULL, "line 1: a stray carriage return", 0, 0},
        {"q\xff,a,b,A\n", NULL, "line 1: not UTF-8", 0, 0},
        {"q,\xff,b,A\n", NULL, "line 1: not UTF-8", 0, 0},
        {",,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,A\n", NULL, "more than 34 cells", 0, 0},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct recorded_rows s = {0};
        char *path = file_put("t.csv", cases[i].text);
        int rc = csv_each(path, row_record, &s, &err);
        assert_true((rc == OK) == !cases[i].refused);
        if (cases[i].refused && !strstr(err.text, cases[i].refused)) fail_msg("%s", err.text);
        assert_int_equal(s.n, cases[i].n);
        assert_int_equal(s.line, cases[i].line);
        if (cases[i].last) assert_string_equal(s.last, cases[i].last);
        free(s.last);
        unlink(path);
        free(path);
    }
}

/* Subjects are files; their examples precede their own questions. */
static void test_shots(void **state) {
    (void)state;
    struct eval_task b;
    struct eval_task_options o = {.dir = dir, .shots = 1};
    free(file_put("mmlu/test/b_law_test.csv", "t2,w,x,y,z,D\n"));
    free(file_put("mmlu/test/a_test.csv", "t0,w,x,y,z,A\nt1,w,x,y,z,B\n"));
    free(file_put("mmlu/dev/a_dev.csv", "d0,w,x,y,z,C\nd1,w,x,y,z,C\n"));
    free(file_put("mmlu/dev/b_law_dev.csv", " d2,w,x,y,z,B\n"));
    check_ok(eval_task_open(&b, "mmlu", &o, &err));
    assert_int_equal(b.n_questions, 3);
    assert_int_equal(b.n_subjects, 2);
    assert_string_equal(b.questions[0].context, "t0\nA. w\nB. x\nC. y\nD. z\nAnswer:");
    assert_string_equal(b.subjects[b.questions[2].subject].preamble,
                        "The following are multiple choice questions (with answers) about b law."
                        "\n\nd2\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n");
    int32_t clusters[3];
    assert_int_equal(eval_task_clusters(&b, clusters), 2);
    assert_int_equal(clusters[0], clusters[1]);
    assert_true(clusters[0] != clusters[2]);
    eval_task_release(&b);
    o.shots = 2;
    assert_int_equal(eval_task_open(&b, "mmlu", &o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "more than the 1 examples of 'mmlu', b law"));
    eval_task_release(&b);
    assert_int_equal(eval_task_open(&b, "copy", &o, &err), ERR_USAGE);
    eval_task_release(&b);
    assert_int_equal(eval_task_open(&b, "boolq", &o, &err), ERR_MISSING);
    assert_non_null(strstr(err.text, "'boolq.jsonl' would be read"));
    eval_task_release(&b);
    assert_int_equal(eval_task_open(&b, "nosuch", &o, &err), ERR_USAGE);
    eval_task_release(&b);
    o.dir = NULL;
    assert_int_equal(eval_task_open(&b, "boolq", &o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "--data"));
    eval_task_release(&b);
}

static void test_recipe(void **state) {
    (void)state;
    struct eval_task b;
    struct eval_task_options o = {.shots = 1};
    free(file_put("r/items.jsonl", "{\"frage\": \"1 + 1\", \"a\": \"2\", \"b\": \"3\", \"key\": "
                                   "\"b\", \"right\": \"3\", \"group\": 4}\n"));
    char *path = file_put("r/own.yaml", "file: items.jsonl\nshots: items.jsonl\nquestion: frage\n"
                                        "choices: [a, b]\nanswer: right\ncluster: group\n"
                                        "template: '{frage} {x} {key}: {lettered}\n\n  ?'\n"
                                        "letters: true\ndelimiter: ''\n");
    assert_true(eval_task_open(&b, path, &o, &err) < 0);
    assert_non_null(strstr(err.text, "line 1: the template's '{x}' is no field"));
    eval_task_release(&b);
    free(path);
    path = file_put("r/own.yaml", "file: items.jsonl\nshots: items.jsonl\nquestion: frage\n"
                                  "choices: [a, b]\nanswer: right\ncluster: group\n"
                                  "template: \"{question} {} { {key}:\\n{lettered}\\n\"\n"
                                  "letters: true\ndelimiter: ''\n");
    check_ok(eval_task_open(&b, path, &o, &err));
    assert_string_equal(b.name, "own");
    assert_string_equal(b.questions[0].context, "1 + 1 {} { b:\nA. 2\nB. 3\n");
    assert_string_equal(b.subjects[0].preamble, "1 + 1 {} { b:\nA. 2\nB. 3\nB\n\n");
    assert_string_equal(b.questions[0].options[1], "B");
    assert_string_equal(b.questions[0].cluster, "4");
    assert_int_equal(b.questions[0].correct, 1);
    eval_task_release(&b);
    free(path);
    path = file_put("r/own.yaml", "file: items.jsonl\nquestion: frage\nanswer: right\n"
                                  "grader: number\nstop: [x, y]\nmax_tokens: 7\n");
    o.shots = 0;
    check_ok(eval_task_open(&b, path, &o, &err));
    assert_int_equal(b.output_type, EVAL_GENERATE);
    assert_int_equal(b.max_tokens, 7);
    assert_int_equal(b.stops.n, 2);
    assert_string_equal(b.questions[0].answer, "3");
    eval_task_release(&b);
    free(path);
    path = file_put("r/own.yaml", "file: items.jsonl\nquestoin: frage\n");
    assert_true(eval_task_open(&b, path, &o, &err) < 0);
    assert_non_null(strstr(err.text, "questoin"));
    eval_task_release(&b);
    free(path);
}

/* scoring */

static struct engine *engine_make(int32_t rows, int32_t len, int threads, struct pool **pool) {
    struct engine_options o = {.max_rows = rows, .max_seqs = rows > 16 ? 8 : 1, .max_len = len};
    o.pool = *pool = pool_new(threads);
    struct engine *e = engine_new(model, &o, &err);
    if (!e) fail_msg("%s", err.text);
    return e;
}

/* log P(continuation | context), from the prompt's log-probabilities of both together. */
static double pair_logprob(struct engine *e, const char *context, const char *continuation) {
    struct token_ids prompt = {0}, rest = {0};
    double sum = 0;
    eval_encode_pair(model->tok, context, continuation, &prompt, &rest);
    int32_t n = prompt.n;
    for (int i = 0; i < rest.n; i++) token_ids_add(&prompt, rest.v[i]);
    struct engine_request r = {.prompt = prompt.v,
                               .n_prompt = prompt.n,
                               .sampling = {.top_p = 1},
                               .prompt_logprobs = true};
    check_ok(engine_run(e, &r, 1, NULL, &err));
    for (int32_t i = n; i < prompt.n; i++) sum += (double)r.prompt_logprob[i];
    engine_request_release(&r);
    token_ids_release(&prompt);
    token_ids_release(&rest);
    return sum;
}

/* The expected result of one question, computed from sums. */
static struct eval_result result_of(struct engine *e, const struct eval_task *b,
                                    const struct eval_question *q) {
    int best = 0, best_norm = 0;
    double lp[EVAL_MAX_OPTIONS], norm[EVAL_MAX_OPTIONS], sum = 0;
    for (int i = 0; i < q->n; i++) {
        char *context = xasprintf("%s%s", b->subjects[q->subject].preamble,
                                  q->contexts[i] ? q->contexts[i] : q->context),
             *option = xasprintf("%s%s", b->delimiter, q->options[i]);
        json_t *text = json_string(q->options[i]);
        size_t n = 0, bytes = json_string_length(text);
        for (size_t k = 0; k < bytes; k++) n += ((uint8_t)q->options[i][k] >> 6) != 2;
        lp[i] = pair_logprob(e, context, option);
        norm[i] = lp[i] / (double)n;
        if (lp[i] > lp[best]) best = i;
        if (norm[i] > norm[best_norm]) best_norm = i;
        json_decref(text);
        free(context);
        free(option);
    }
    for (int i = 0; i < q->n; i++) sum += exp(lp[i] - lp[best]);
    return (struct eval_result){.choice = (int16_t)best,
                                .prob = (float)(1 / sum),
                                .right = best == q->correct,
                                .right_norm = best_norm == q->correct};
}

static const char arc_lines[] =
    "{\"query\": \"Question: Which is hottest?\", \"choices\": [\"ice\", \"the steam of a pot\", "
    "\"water\"], \"gold\": 1}\n"
    "{\"query\": \"Question: 水は？ \", \"choices\": [\"水蒸気\", \"h\", \"ice water\"], \"gold\": "
    "1}\n"
    "{\"query\": \"Question: c\", \"choices\": [\"aaaaaaaaaaaaaaaa\", \"b\"], \"gold\": 0}\n"
    "{\"query\": \"Question: d\", \"choices\": [\"x\", \"xyz\", \"xy\", \"x\"], \"gold\": 2}\n";
static const char schema_lines[] =
    "{\"context_options\": [\"for the cup\", \"for box\"], \"continuation\": \"is.\", \"gold\": "
    "1}\n"
    "{\"context_options\": [\"Ann saw\", \"so Bob\"], \"continuation\": \"is too large.\", "
    "\"gold\": 0}\n";

static void task_check(const char *task, int32_t rows, int threads) {
    struct eval_task b;
    struct pool *pool;
    struct engine *e = engine_make(rows, LEN, threads, &pool);
    check_ok(eval_task_open(&b, task, &(struct eval_task_options){.dir = dir}, &err));
    struct eval_result *out = xcalloc((size_t)b.n_questions, sizeof *out);
    struct eval_cost cost = {0};
    struct eval_solver s = {.e = e, .tok = model->tok, .max_len = LEN};
    check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
    assert_int_equal(cost.calls, b.questions[0].contexts[0] ? 2 * b.n_questions : b.n_questions);
    assert_int_equal(cost.generated, 0);
    for (int64_t i = 0; i < b.n_questions; i++) {
        struct eval_result want = result_of(e, &b, &b.questions[i]);
        assert_int_equal(out[i].choice, want.choice);
        assert_int_equal(out[i].right, want.right);
        assert_int_equal(out[i].right_norm, want.right_norm);
        assert_false(out[i].prompt_truncated);
        close_to((double)out[i].prob, (double)want.prob, 1e-5);
    }
    free(out);
    eval_task_release(&b);
    engine_free(e);
    pool_free(pool);
}

static void test_scores(void **state) {
    (void)state;
    free(file_put("arc_easy.jsonl", arc_lines));
    free(file_put("winogrande.jsonl", schema_lines));
    for (int threads = 1; threads <= 2; threads++) {
        task_check("arc_easy", threads == 1 ? 64 : 7, threads);
        task_check("winogrande", 64, threads);
    }
}

/* acc and acc_norm select different options if a long text has the higher score per character. */
static void test_norm_differs(void **state) {
    (void)state;
    struct eval_task b;
    struct pool *pool;
    struct engine *e = engine_make(64, LEN, 1, &pool);
    free(file_put("arc_easy.jsonl", arc_lines));
    check_ok(eval_task_open(&b, "arc_easy", &(struct eval_task_options){.dir = dir}, &err));
    struct eval_result o = result_of(e, &b, &b.questions[2]);
    assert_int_equal(o.choice, 1);
    assert_true(o.right_norm && !o.right);
    eval_task_release(&b);
    engine_free(e);
    pool_free(pool);
}

/* A prompt that is too long is cut at the front and counted. */
static void test_truncated_prompts(void **state) {
    (void)state;
    struct eval_task b;
    struct pool *pool;
    struct engine *e = engine_make(64, LEN, 1, &pool);
    struct eval_result out[4];
    struct eval_cost cost = {0};
    struct eval_solver s = {.e = e, .tok = model->tok, .max_len = 40};
    free(file_put("arc_easy.jsonl", arc_lines));
    check_ok(eval_task_open(&b, "arc_easy", &(struct eval_task_options){.dir = dir}, &err));
    check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
    assert_true(out[0].prompt_truncated && !out[2].prompt_truncated && !out[3].prompt_truncated);
    char *context =
        b.questions[0].context; // the last 40 tokens, each a byte, minus the longest option
    size_t room = 40 - strlen(" the steam of a pot");
    char *kept = context + strlen(context) - room;
    b.questions[0].context = kept;
    struct eval_result want = result_of(e, &b, &b.questions[0]);
    b.questions[0].context = context;
    assert_int_equal(out[0].choice, want.choice);
    close_to((double)out[0].prob, (double)want.prob, 1e-5);
    engine_free(e);
    pool_free(pool);
    s.max_len = 10; // an option does not fit even without context
    s.e = e = engine_make(64, s.max_len, 1, &pool);
    assert_int_equal(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "arc_easy.jsonl', line 1: the prompt has"));
    eval_task_release(&b);
    engine_free(e);
    pool_free(pool);
}

/* Examples before every question are prefilled once; the scores are those of whole prompts. */
static void test_shared_examples(void **state) {
    (void)state;
    struct eval_task b;
    struct pool *pool;
    struct engine *e = engine_make(64, LEN, 1, &pool);
    struct eval_result out[6];
    struct eval_cost cost = {0};
    struct eval_solver s = {.e = e, .tok = model->tok, .max_len = LEN};
    free(file_put("mmlu/test/c_test.csv", "t0,w,x,y,z,A\nt1,w,x,y,z,B\nt2,1,2,3,4,C\n"
                                          "t3,w,x,y,z,A\nt4,x,x,z,z,B\nt5,4,3,2,1,C\n"));
    free(file_put("mmlu/dev/c_dev.csv", "d0,w,x,y,z,C\nd1,w,x,y,z,A\n"));
    file_remove("mmlu/test/a_test.csv");
    file_remove("mmlu/test/b_law_test.csv");
    check_ok(eval_task_open(&b, "mmlu", &(struct eval_task_options){.dir = dir, .shots = 2}, &err));
    assert_int_equal(b.n_questions, 6);
    check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
    int64_t shared = (int64_t)strlen(b.subjects[b.questions[0].subject].preamble);
    assert_true((int64_t)engine_stats(e).prefilled <= cost.prefilled - 5 * shared);
    for (int i = 0; i < 6; i++) {
        struct eval_result want = result_of(e, &b, &b.questions[i]);
        assert_int_equal(out[i].choice, want.choice);
        close_to((double)out[i].prob, (double)want.prob, 1e-5);
    }
    eval_task_release(&b);
    engine_free(e);
    pool_free(pool);
}

/* Generated answers equal those of single requests; errors of form are counted separately. */
static void test_generation(void **state) {
    (void)state;
    struct eval_task b;
    struct pool *pool;
    struct engine *e = engine_make(64, LEN, 1, &pool);
    struct eval_result out[3];
    struct eval_cost cost = {0};
    struct eval_solver s = {.e = e, .tok = model->tok, .max_len = LEN};
    free(file_put("gen.jsonl", "{\"question\": \"空は?\", \"answer\": \"1\"}\n"
                               "{\"question\": \"b\", \"answer\": \"2\"}\n"
                               "{\"question\": \"c\", \"answer\": \"3\"}\n"));
    char *path = file_put("gen.yaml", "file: gen.jsonl\ngrader: number\nmax_tokens: 9\n");
    check_ok(eval_task_open(&b, path, &(struct eval_task_options){0}, &err));
    check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
    const struct grader *g = grader_find("number", &err);
    assert_non_null(g);
    for (int i = 0; i < 3; i++) {
        struct token_ids ids = {0};
        struct buf text = {0};
        int32_t eos = tokenizer_eos(model->tok);
        tokenizer_encode(model->tok, b.questions[i].context, strlen(b.questions[i].context),
                         TOKENIZER_ADD_BOS, &ids);
        struct engine_request r = {.prompt = ids.v,
                                   .n_prompt = ids.n,
                                   .max_tokens = 9,
                                   .sampling = {.top_p = 1},
                                   .stop = &eos,
                                   .n_stop = eos >= 0};
        check_ok(engine_run(e, &r, 1, NULL, &err));
        buf_puts(&text, "");
        tokenizer_decode(model->tok, r.out, r.n_out, false, &text);
        struct grade want =
            grader_grade(g, text.data, (const char *const *)&b.questions[i].answer, 1);
        assert_int_equal(out[i].no_answer, !want.found);
        assert_int_equal(out[i].truncated, r.n_out == 9);
        assert_int_equal(out[i].right, want.score >= 0.5);
        engine_request_release(&r);
        token_ids_release(&ids);
        buf_release(&text);
    }
    assert_int_equal(cost.calls, 3);
    assert_true(cost.generated > 0 && cost.generated <= 27);
    eval_task_release(&b);
    free(path);
    path = file_put("gen.yaml", "file: gen.jsonl\ngrader: nosuch\n");
    check_ok(eval_task_open(&b, path, &(struct eval_task_options){0}, &err));
    assert_int_equal(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err), ERR_USAGE);
    eval_task_release(&b);
    free(path);
    engine_free(e);
    pool_free(pool);
}

/* Greedy text after the context of a question, malloc'ed. */
static char *greedy_text(struct engine *e, const struct model *m, const char *context, int32_t n) {
    struct token_ids ids = {0};
    struct buf text = {0};
    int32_t eos = tokenizer_eos(m->tok);
    tokenizer_encode(m->tok, context, strlen(context), TOKENIZER_ADD_BOS, &ids);
    struct engine_request r = {.prompt = ids.v,
                               .n_prompt = ids.n,
                               .max_tokens = n,
                               .sampling = {.top_p = 1},
                               .stop = &eos,
                               .n_stop = eos >= 0};
    check_ok(engine_run(e, &r, 1, NULL, &err));
    buf_puts(&text, "");
    tokenizer_decode(m->tok, r.out, r.n_out, false, &text);
    engine_request_release(&r);
    token_ids_release(&ids);
    return text.data;
}

/* A continuation is right if the greedy text begins with it. The gold answers are beginnings of
 * the greedy text, of any length, and other texts; the verdicts equal those of the whole text,
 * although a generation ends when its verdict is certain. */
static void test_continuations(void **state) {
    (void)state;
    struct eval_task b;
    struct model *fry = model_open("test/models/fry-1", NUMERIC_EXACT, &err);
    if (!fry) fail_msg("%s", err.text);
    struct engine_options o = {.max_rows = 64, .max_len = 128, .pool = pool_new(1)};
    struct engine *e = engine_new(fry, &o, &err);
    struct eval_solver s = {.e = e, .tok = fry->tok, .max_len = 128};
    struct eval_result out[2];
    const struct grader *g;
    int n_right = 0, n_wrong = 0;
    char *path = file_put("lm.jsonl", "{\"context\": \"mia has a red box and \", \"continuation\": "
                                      "\"a blue box or so\"}\n"
                                      "{\"context\": \"3, 4, 5, \", \"continuation\": \"6\"}\n");
    check_ok(eval_task_open(&b, path, &(struct eval_task_options){0}, &err));
    assert_int_equal(b.max_tokens, strlen("a blue box or so") + 8);
    check_ok(eval_task_grader(&b, &g, &err));
    char *text[2];
    for (int i = 0; i < 2; i++) text[i] = greedy_text(e, fry, b.questions[i].context, b.max_tokens);
    for (size_t len = 1; len < 16; len++) {
        struct eval_cost cost = {0};
        for (int i = 0; i < 2; i++) {
            const char *start = text[i] + strspn(text[i], " \n");
            free(b.questions[i].answer);
            b.questions[i].answer = xasprintf("%.*s%s", (int)len, start, len % 5 ? "" : "~");
        }
        check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
        for (int i = 0; i < 2; i++) {
            const char *gold = b.questions[i].answer;
            bool want = grader_grade(g, text[i], &gold, 1).score == 1;
            if (out[i].right != want) fail_msg("'%s' in '%s': %d", gold, text[i], out[i].right);
            assert_false(out[i].truncated);
            n_right += want;
            n_wrong += !want;
        }
    }
    assert_true(n_right > 0 && n_wrong > 5);
    struct eval_cost cost = {0}; // a wrong first token ends the generation; an alias counts too
    free(b.questions[0].answer);
    b.questions[0].answer = xstrdup("~~~~~~~~~~~~~~~~~~~~");
    strings_add(&b.questions[1].aliases, b.questions[1].answer);
    free(b.questions[1].answer);
    b.questions[1].answer = xstrdup("~");
    check_ok(eval_solver_answer(&s, &b, out, &cost, NULL, 0, &err));
    const char *alias = b.questions[1].aliases.v[0];
    assert_false(out[0].right);
    assert_int_equal(out[1].right, grader_grade(g, text[1], &alias, 1).score == 1);
    assert_true(cost.generated < 2 * b.max_tokens);
    for (int i = 0; i < 2; i++) free(text[i]);
    eval_task_release(&b);
    free(path);
    engine_free(e);
    pool_free(o.pool);
    model_close(fry);
}

/* The order of GPQA's choices depends on the question only. */
static void test_gpqa(void **state) {
    (void)state;
    static const char line[] = "{\"Question\": \"Which %d?\", \"Correct Answer\": \" right\\n\", "
                               "\"Incorrect Answer 1\": \"w1\", \"Incorrect Answer 2\": \"w  2\", "
                               "\"Incorrect Answer 3\": 3, \"id\": %d}\n";
    struct eval_task a, b;
    struct buf text = {0};
    int position[4] = {0};
    for (int i = 0; i < 40; i++) buf_printf(&text, line, i, i);
    free(file_put("gpqa.jsonl", text.data));
    buf_release(&text);
    check_ok(eval_task_open(&a, "gpqa", &(struct eval_task_options){.dir = dir}, &err));
    check_ok(eval_task_open(&b, "gpqa", &(struct eval_task_options){.dir = dir, .n = 20, .seed = 7},
                            &err));
    assert_string_equal(a.form, "GPQA");
    for (int i = 0; i < 40; i++) {
        const struct eval_question *q = &a.questions[i];
        char *right = xasprintf("(%c) right\n", 'A' + q->correct),
             *question = xasprintf("What is the correct answer to this question:Which %d?\n"
                                   "Choices:\n(A) ",
                                   i);
        assert_int_equal(q->n, 4);
        assert_string_equal(q->options[2], "(C)");
        assert_true(strncmp(q->context, question, strlen(question)) == 0);
        assert_true(strstr(q->context, right) || q->correct == 3);
        assert_non_null(strstr(q->context, ") w 2\n") ? q->context
                                                      : strstr(q->context, ") w 2\nAnswer:"));
        position[q->correct]++;
        free(right);
        free(question);
    }
    for (int i = 0; i < 4; i++) assert_true(position[i] > 2 && position[i] < 20);
    for (int64_t k = 0; k < b.n_questions; k++)
        assert_string_equal(b.questions[k].context, a.questions[b.questions[k].line - 1].context);
    eval_task_release(&a);
    eval_task_release(&b);
}

/* The first lines of an unnamed file are its examples. */
static void test_own_examples(void **state) {
    (void)state;
    struct eval_task b;
    struct eval_task_options o = {.shots = 2};
    char *path =
        file_put("own.jsonl", "{\"query\": \"a\", \"choices\": [\"1\", \"2\"], \"gold\": 0}\n"
                              "{\"query\": \"b\", \"choices\": [\"1\", \"2\"], \"gold\": 1}\n"
                              "{\"query\": \"c\", \"choices\": [\"1\", \"2\"], \"gold\": 1}\n");
    check_ok(eval_task_open(&b, path, &o, &err));
    assert_int_equal(b.n_questions, 1);
    assert_string_equal(b.questions[0].context, "c");
    assert_string_equal(b.subjects[0].preamble, "a 1\n\nb 2\n\n");
    eval_task_release(&b);
    o.shots = 3;
    assert_int_equal(eval_task_open(&b, path, &o, &err), ERR_MISSING);
    assert_non_null(strstr(err.text, "the first 3 lines of 'own' would be the examples"));
    eval_task_release(&b);
    free(path);
    free(file_put("piqa.jsonl",
                  "{\"goal\": \"g\", \"sol1\": \"x\", \"sol2\": \"y\", \"label\": 1}\n"));
    o = (struct eval_task_options){.dir = dir, .shots = 1}; // a named task has a file of examples
    assert_int_equal(eval_task_open(&b, "piqa", &o, &err), ERR_MISSING);
    eval_task_release(&b);
    free(file_put("piqa/train.jsonl",
                  "{\"goal\": \"t\", \"sol1\": \"x\", \"sol2\": \"y\", \"label\": 0}\n"));
    check_ok(eval_task_open(&b, "piqa", &o, &err));
    assert_int_equal(b.n_questions, 1);
    assert_string_equal(b.subjects[0].preamble, "Question: t\nAnswer: x\n\n");
    eval_task_release(&b);
}

/* Each file of BIG-Bench Hard is a subject with its description and its examples. */
static void test_bbh(void **state) {
    (void)state;
    struct eval_task b;
    struct eval_task_options o = {.dir = dir, .shots = 1};
    free(file_put("bbh/web_of_lies.jsonl", "{\"input\": \"w0\", \"target\": \"Yes\"}\n"
                                           "{\"input\": \"w1\", \"target\": \"No\"}\n"));
    free(file_put("bbh/dyck_languages.jsonl", "{\"input\": \"d0\", \"target\": \"]\"}\n"
                                              "{\"input\": \"d1\", \"target\": \"} ]\"}\n"));
    check_ok(eval_task_open(&b, "bbh", &o, &err));
    assert_int_equal(b.n_questions, 2);
    assert_string_equal(b.questions[0].context, "Q: d1\nA:");
    assert_string_equal(b.subjects[b.questions[0].subject].preamble,
                        "Correctly close a Dyck-n word.\n\nQ: d0\nA: ]\n\n");
    assert_string_equal(b.subjects[b.questions[1].subject].preamble,
                        "Evaluate a random boolean function expressed as a word problem.\n\n"
                        "Q: w0\nA: Yes\n\n");
    assert_null(bbh_description("cooking"));
    eval_task_release(&b);
}

/* A line end ends an answer of words, unless examples show reasoning before the answer. */
static void test_stops_of_free_answers(void **state) {
    (void)state;
    static const struct {
        const char *line;
        int64_t shots;
        bool line_ends;
    } cases[] = {
        {"{\"question\": \"q\", \"answer\": \"Paris\"}\n", 0, true},
        {"{\"question\": \"q\", \"answer\": \"Paris\"}\n", 1, true},
        {"{\"question\": \"q\", \"answer\": \"3\"}\n", 0, false},
        {"{\"question\": \"q\", \"answer\": \"x\\ny\"}\n", 0, false},
        {"{\"context\": \"q\", \"answer\": \"3 km\", \"chain_of_thought\": \"r\"}\n", 0, true},
        {"{\"context\": \"q\", \"answer\": \"3 km\", \"chain_of_thought\": \"r\"}\n", 1, false},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct eval_task b;
        bool line_ends = false;
        char *twice = xasprintf("%s%s", cases[i].line, cases[i].line),
             *path = file_put("free.jsonl", twice);
        check_ok(
            eval_task_open(&b, path, &(struct eval_task_options){.shots = cases[i].shots}, &err));
        for (int k = 0; k < b.stops.n; k++) line_ends |= strcmp(b.stops.v[k], "\n") == 0;
        if (line_ends != cases[i].line_ends) fail_msg("case %zu: %d", i, line_ends);
        eval_task_release(&b);
        free(path);
        free(twice);
    }
}

/* Teams get aliases with the gold answer, and a recipe with the grader `letter` may have choices.
 */
static void test_items_of_generated_answers(void **state) {
    (void)state;
    struct eval_task b;
    char *path =
        file_put("t.jsonl", "{\"context\": \"Question: q?\\nAnswer:\", \"answer\": \"Onion\", "
                            "\"aliases\": [\"Onion\", \"Allium cepa\"]}\n");
    check_ok(eval_task_open(&b, path, &(struct eval_task_options){0}, &err));
    struct task_item *items = eval_task_items(&b);
    assert_string_equal(items[0].gold, "Onion");
    assert_int_equal(items[0].gold_aliases.n, 1);
    assert_string_equal(items[0].gold_aliases.v[0], "Allium cepa");
    task_items_release(items, b.n_questions);
    eval_task_release(&b);
    free(path);
    free(file_put("r/letters.jsonl",
                  "{\"question\": \"q\", \"choices\": [\"x\", \"y\"], \"answer\": 1}\n"));
    path = file_put("r/letters.yaml", "file: letters.jsonl\ngrader: letter\nchoices: [choices]\n"
                                      "template: \"{question}\\n{parenthesized}\\nAnswer:\"\n");
    check_ok(eval_task_open(&b, path, &(struct eval_task_options){0}, &err));
    assert_int_equal(b.output_type, EVAL_GENERATE);
    assert_int_equal(b.questions[0].n, 0);
    assert_string_equal(b.questions[0].answer, "B");
    assert_string_equal(b.questions[0].context, "q\n(A) x\n(B) y\nAnswer:");
    eval_task_release(&b);
    free(path);
}

static void check_ids_text(const struct token_ids *ids, const char *want) {
    struct buf b = {0};
    buf_puts(&b, "");
    tokenizer_decode(model->tok, ids->v, ids->n, false, &b);
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static void test_pairs(void **state) {
    (void)state;
    static const char *const cases[][4] = {
        {"Answer:", " ice", "Answer:", " ice"},
        {"Answer: \n", "ice", "Answer:", " \nice"},
        {"[答え]:", "蛇口", "[答え]:", "蛇口"},
        {"答え: \u3000\t", "蛇口", "答え:", " \u3000\t蛇口"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct token_ids prompt = {0}, rest = {0};
        eval_encode_pair(model->tok, cases[i][0], cases[i][1], &prompt, &rest);
        check_ids_text(&prompt, cases[i][2]);
        check_ids_text(&rest, cases[i][3]);
        token_ids_release(&prompt);
        token_ids_release(&rest);
    }
    struct token_ids prompt = {0}, rest = {0}; // an empty context: the token that begins a text
    eval_encode_pair(model->tok, "", "ice", &prompt, &rest);
    assert_int_equal(prompt.n, 1);
    check_ids_text(&rest, "ice");
    token_ids_release(&prompt);
    token_ids_release(&rest);
}

/* n of the questions, chosen by the seed, in their order. */
static void test_sampling(void **state) {
    (void)state;
    struct buf text = {0};
    int differ = 0;
    for (int i = 0; i < 50; i++)
        buf_printf(&text, "{\"question\": \"%02d\", \"choices\": [1, 2], \"answer\": 0}\n", i);
    char *path = file_put("fifty.jsonl", text.data);
    buf_release(&text);
    for (int k = 0; k < 2; k++) {
        struct eval_task a, b;
        struct eval_task_options o = {.n = 20, .seed = 1};
        check_ok(eval_task_open(&a, path, &o, &err));
        o.seed += (uint64_t)k;
        check_ok(eval_task_open(&b, path, &o, &err));
        assert_int_equal(a.n_questions, 20);
        for (int i = 0; i < 20; i++) {
            bool same = strcmp(a.questions[i].context, b.questions[i].context) == 0;
            differ += !same;
            if (k == 0) assert_true(same);
            if (i) assert_true(strcmp(b.questions[i - 1].context, b.questions[i].context) < 0);
        }
        eval_task_release(&a);
        eval_task_release(&b);
    }
    assert_true(differ > 5);
    free(path);
}

/* Statistics of known outcomes: a is correct on items 0-5 of 10, b on none of them. */
static void test_summarize(void **state) {
    (void)state;
    struct eval_result a[10] = {{0}}, b[10] = {{0}};
    int32_t clusters[10];
    for (int i = 0; i < 10; i++) {
        a[i].right = i < 6;
        b[i].right = i == 9;
        b[i].right_norm = i > 7;
        b[i].no_answer = i == 1;
        b[i].truncated = i < 3;
        clusters[i] = i / 2;
    }
    struct eval_summary s = eval_summarize(b, a, 10, clusters, 5, 1);
    assert_int_equal(s.correct, 1);
    assert_int_equal(s.correct_norm, 2);
    assert_int_equal(s.no_answer, 1);
    assert_int_equal(s.truncated, 3);
    close_to(s.versus.diff.value, -0.5, 1e-12);
    close_to(s.versus.p, 2 * 8 / 128.0, 1e-12); // 1 of 7 discordant: 2 · (1 + 7) / 2^7
    assert_true(s.versus_clustered.lo <= -0.5 && s.versus_clustered.hi >= -0.5);
    assert_false(s.equivalent);
    for (int i = 0; i < 10; i += 2) b[i] = (struct eval_result){.failed = true};
    b[1].failed = true; // no question of cluster 0 is left
    struct eval_summary rest = eval_summarize(b, a, 10, clusters, 5, 1);
    assert_int_equal(rest.n, 4);
    assert_int_equal(rest.failed, 6);
    assert_int_equal(rest.n_clusters, 4);
    assert_int_equal(rest.no_answer, 0);
    close_to(rest.acc.value, 0.25, 1e-12);
    assert_int_equal(rest.versus.n, 4);
    assert_int_equal(rest.versus.only_a, 1);
    assert_int_equal(rest.versus.only_b, 2); // questions 3 and 5
    close_to(rest.clustered.value, 0.25, 1e-12);
    struct eval_summary own = eval_summarize(a, a, 10, clusters, 5, 1);
    assert_int_equal(own.versus.n, 0);
    close_to(own.acc.value, 0.6, 1e-12);
}

/* The data of the shared folder: the number of questions of each set is known. */
static void test_known_sets(void **state) {
    (void)state;
    static const struct {
        const char *task;
        int n;
    } known[] = {{"arc_easy", 2376}, {"arc_challenge", 1172},  {"winogrande", 1267},
                 {"boolq", 3270},    {"jcommonsenseqa", 1119}, {"gsm8k", 1319},
                 {"mmlu", 14042}};
    char *root = fixture_shared("data/eval");
    if (!root) skip();
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        struct eval_task b;
        check_ok(eval_task_open(&b, known[i].task, &(struct eval_task_options){.dir = root}, &err));
        if (b.n_questions != known[i].n)
            fail_msg("%s: %d questions", known[i].task, (int)b.n_questions);
        eval_task_release(&b);
    }
    struct eval_task b;
    check_ok(eval_task_open(&b, "mmlu",
                            &(struct eval_task_options){.dir = root, .shots = 5, .n = 100}, &err));
    assert_int_equal(b.n_subjects, 57);
    eval_task_release(&b);
    free(root);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_documented_forms),
        cmocka_unit_test(test_bbh),
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_csv),
        cmocka_unit_test(test_shots),
        cmocka_unit_test(test_recipe),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_norm_differs),
        cmocka_unit_test(test_truncated_prompts),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_summarize),
        cmocka_unit_test(test_known_sets),
        cmocka_unit_test(test_shared_examples),
        cmocka_unit_test(test_generation),
        cmocka_unit_test(test_continuations),
        cmocka_unit_test(test_gpqa),
        cmocka_unit_test(test_own_examples),
        cmocka_unit_test(test_stops_of_free_answers),
        cmocka_unit_test(test_items_of_generated_answers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
