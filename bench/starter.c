/*
 * starter: what 'shoal eval' does not measure of the starter model.
 *
 *   build/starter judge MODEL [N]      Judgements of its own answers: it answers N (1000) common
 *                                      questions of each family at temperature 1, and is asked
 *                                      whether each answer is right, with a derivation. Prints the
 *                                      share of right answers, and the area under the ROC curve of
 *                                      P(yes): the probability that a right answer gets a larger
 *                                      P(yes) than a wrong one.
 *   build/starter needle MODEL [N]     Accuracy of N (1000) needles in 4,000 tokens, by depth.
 *   build/starter tokens MODEL FILE …  Characters per token of texts.
 *   build/starter curves LOG DIR       DIR/loss.svg and DIR/accuracy.svg of a log of 'shoal
 *                                      pretrain'.
 */
#define _GNU_SOURCE
#include "engine/engine.h"
#include "eval/eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const families[] = {"sort",  "compare", "sequence",  "arithmetic", "pick",
                                       "order", "route",   "deduction", "machine",    "sums"};
enum { N_FAMILIES = ARRAY_LEN(families), MAX_TOKENS = 96 };

struct judged_answer {
    double yes;
    bool right;
};

static int by_yes(const void *a, const void *b) {
    const struct judged_answer *x = a, *y = b;
    return (x->yes > y->yes) - (x->yes < y->yes);
}

/* Mann and Whitney's U over the number of pairs; equal values count half. -1: only one kind. */
static double auc(struct judged_answer *v, int n) {
    double right = 0, pairs = 0, wrong_before = 0;
    qsort(v, (size_t)n, sizeof *v, by_yes);
    for (int i = 0, end; i < n; i = end) {
        double wrong = 0, rights = 0;
        for (end = i; end < n && v[end].yes <= v[i].yes; end++) {
            rights += v[end].right;
            wrong += !v[end].right;
        }
        pairs += rights * (wrong_before + wrong / 2);
        wrong_before += wrong;
        right += rights;
    }
    return right > 0 && wrong_before > 0 ? pairs / right / wrong_before : -1;
}

static void requests_run(struct engine *e, struct engine_request *v, int n) {
    struct error err;
    for (int i = 0; i < n; i++)
        if (engine_submit(e, &v[i], &err) != OK) fprintf(stderr, "%s\n", err.text), exit(1);
    while (engine_step(e) > 0) continue;
}

/* The text after the last ANSWER_PREFIX of a reply; malloc'ed. */
static char *answer_of(const struct tokenizer *tok, const struct engine_request *r) {
    struct buf text = {0};
    const char *found = "", *p;
    tokenizer_decode(tok, r->out, r->n_out, false, &text);
    buf_add(&text, "", 1);
    for (p = text.data; (p = strstr(p, ANSWER_PREFIX " "));) found = p += strlen(ANSWER_PREFIX " ");
    char *answer = strndup(found, strcspn(found, "\n"));
    buf_release(&text);
    return answer;
}

/* Answers n items and sets answers[n]. */
static void answer_items(struct engine *e, const struct tokenizer *tok,
                         const struct task_item *items, int n, char **answers) {
    struct engine_request *v = xcalloc((size_t)n, sizeof *v);
    struct token_ids *prompts = xcalloc((size_t)n, sizeof *prompts);
    struct error err;
    int32_t stop = tokenizer_eot(tok);
    for (int i = 0; i < n; i++) {
        const struct chat_message user = {"user", items[i].question};
        CHECK(chat_encode(tok, &user, 1, true, &prompts[i], NULL, &err) == OK);
        v[i] =
            (struct engine_request){.prompt = prompts[i].v,
                                    .n_prompt = prompts[i].n,
                                    .sampling = {.temperature = 1, .top_p = 1, .seed = (uint64_t)i},
                                    .max_tokens = MAX_TOKENS,
                                    .stop = &stop,
                                    .n_stop = 1};
    }
    requests_run(e, v, n);
    for (int i = 0; i < n; i++) {
        answers[i] = answer_of(tok, &v[i]);
        engine_request_release(&v[i]);
        token_ids_release(&prompts[i]);
    }
    free(v);
    free(prompts);
}

/* Sets out[n] to the judgements of the answers. */
static void judge_answers(struct engine *e, const struct tokenizer *tok,
                          const struct task_item *items, int n, char **answers,
                          struct judged_answer *out) {
    struct engine_request *v = xcalloc((size_t)n, sizeof *v);
    struct choice_prompt *prompts = xcalloc((size_t)n, sizeof *prompts);
    struct error err;
    struct task_item yes_no = {.n_choices = 2,
                               .choices = {(char *)(uintptr_t) "yes", (char *)(uintptr_t) "no"}};
    for (int i = 0; i < n; i++) {
        char *question = family_judge_question(&items[i], answers[i]);
        const struct chat_message user = {"user", question};
        CHECK(choice_prompt_init(&prompts[i], tok, &user, 1, &yes_no, true, &err) == OK);
        choice_prompt_request(&prompts[i], NULL, MAX_TOKENS, &v[i]);
        free(question);
    }
    requests_run(e, v, n);
    for (int i = 0; i < n; i++) {
        const struct task_item *it = &items[i];
        out[i] = (struct judged_answer){(double)v[i].choice_prob[0],
                                        strcmp(answers[i], it->choices[it->correct]) == 0};
        engine_request_release(&v[i]);
        choice_prompt_release(&prompts[i]);
    }
    free(v);
    free(prompts);
}

static void row_print(const char *name, struct judged_answer *v, int n) {
    int right = 0;
    for (int i = 0; i < n; i++) right += v[i].right;
    double area = auc(v, n);
    printf("%-12s %6d  right %6.2f %%  ", name, n, 100.0 * right / n);
    if (area < 0)
        printf("AUC -\n");
    else
        printf("AUC %.3f\n", area);
}

static int judge(struct model *m, struct engine *e, int n) {
    struct judged_answer *all = xcalloc((size_t)n * N_FAMILIES, sizeof *all);
    struct task_item *items = xcalloc((size_t)n, sizeof *items);
    char **answers = xcalloc((size_t)n, sizeof *answers);
    for (int f = 0; f < N_FAMILIES; f++) {
        for (int i = 0; i < n; i++)
            family_item(family_find(families[f]), SPLIT_TEST, 1, (uint32_t)i, true, &items[i]);
        answer_items(e, m->tok, items, n, answers);
        judge_answers(e, m->tok, items, n, answers, all + f * n);
        row_print(families[f], all + f * n, n);
        for (int i = 0; i < n; i++) {
            free(answers[i]);
            task_item_release(&items[i]);
        }
    }
    row_print("all", all, n * N_FAMILIES);
    free(all);
    free(items);
    free(answers);
    return 0;
}

/* The place of the right number in the text, in tenths. */
static int depth_of(const struct task_item *it) {
    char *end = strrchr(it->question, '\n');
    const char *found = strstr(it->question, it->choices[it->correct]);
    CHECK(found && end && found < end);
    return (int)(10 * (found - it->question) / (end - it->question));
}

static int needle(struct model *m, struct engine *e, int n) {
    struct error err;
    struct eval_score score = {0};
    int family = family_find("needle"), right_at[10] = {0}, n_at[10] = {0};
    uint8_t *right = xcalloc((size_t)n, 1);
    if (eval_run_family(e, m->tok, family, SPLIT_TEST, 1, n, NULL, false, right, &score, NULL,
                        &err) != OK)
        return fprintf(stderr, "%s\n", err.text), 1;
    for (int i = 0; i < n; i++) {
        struct task_item it;
        family_item(family, SPLIT_TEST, 1, (uint32_t)i, false, &it);
        int depth = depth_of(&it);
        n_at[depth]++;
        right_at[depth] += right[i];
        task_item_release(&it);
    }
    for (int d = 0; d < 10; d++)
        printf("depth %d%%-%d%%  %4d  %6.2f %%\n", 10 * d, 10 * d + 10, n_at[d],
               100.0 * right_at[d] / MAX(n_at[d], 1));
    printf("all  %d  %.2f %%\n", n, 100.0 * (double)score.correct / n);
    free(right);
    return 0;
}

static int tokens(const struct model *m, const char *path) {
    struct error err;
    struct buf text = {0};
    struct token_ids ids = {0};
    int64_t characters = 0;
    if (file_read(path, (size_t)1 << 24, &text, &err) != OK)
        return fprintf(stderr, "%s\n", err.text), 1;
    for (size_t i = 0; i < text.len; i++) characters += (text.data[i] & 0xC0) != 0x80;
    tokenizer_encode(m->tok, text.data, text.len, 0, &ids);
    printf("%s: %.2f characters per token\n", path, (double)characters / MAX(ids.n, 1));
    buf_release(&text);
    token_ids_release(&ids);
    return 0;
}

struct log_curves {
    struct curve loss, accuracy[MAX_FAMILIES];
    const char *names[MAX_FAMILIES];
    int n_families;
};

static int add_log_line(void *ctx, const json_t *line, int number, struct error *err) {
    struct log_curves *c = ctx;
    const char *key;
    json_t *value;
    (void)number, (void)err;
    if (json_object_get(line, "loss"))
        curve_add(&c->loss, json_get_number(line, "update"), json_get_number(line, "loss"));
    double at = json_get_number(line, "accuracy_at");
    int n = 0;
    if (at <= 0) return OK;
    json_object_foreach ((json_t *)(uintptr_t)line, key, value) {
        int family = family_find(key);
        if (family < 0 || n == MAX_FAMILIES) continue;
        c->names[n] = task_families[family]->name;
        curve_add(&c->accuracy[n++], at, 100 * json_number_value(value));
    }
    c->n_families = n;
    return OK;
}

static int curves(const char *log, const char *dir) {
    static struct log_curves c;
    const char *loss = "loss";
    struct buf path = {0}, svg = {0};
    struct error err;
    int rc = json_file_each(log, add_log_line, &c, &err);
    if (rc == OK) {
        plot_svg(&svg, "cross-entropy of the targets, nats per token", "updates", &c.loss, NULL,
                 &loss, 1);
        buf_printf(&path, "%s/loss.svg", dir);
        rc = file_write(path.data, svg.data, svg.len, &err);
    }
    if (rc == OK) {
        path.len = svg.len = 0;
        plot_svg(&svg, "accuracy on the development split, %", "updates", c.accuracy, NULL, c.names,
                 c.n_families);
        buf_printf(&path, "%s/accuracy.svg", dir);
        rc = file_write(path.data, svg.data, svg.len, &err);
    }
    if (rc != OK) fprintf(stderr, "%s\n", err.text);
    buf_release(&path);
    buf_release(&svg);
    return rc != OK;
}

int main(int argc, char **argv) {
    struct error err;
    if (argc == 4 && strcmp(argv[1], "curves") == 0) return curves(argv[2], argv[3]);
    if (argc < 3)
        return fprintf(stderr,
                       "usage: starter judge|needle|tokens|curves MODEL|LOG [N|FILE …|DIR]\n"),
               2;
    struct model *m = model_open(argv[2], NUMERIC_EXACT, &err);
    if (!m) return fprintf(stderr, "%s\n", err.text), 1;
    bool long_texts = strcmp(argv[1], "needle") == 0;
    int rc = 0, n = argc > 3 ? atoi(argv[3]) : 1000;
    struct pool *pool = pool_new(2);
    struct engine_options o = {.max_rows = 512,
                               .max_seqs = long_texts ? 16 : 256,
                               .max_len = long_texts ? m->config.max_seq_len : 256,
                               .pool = pool};
    struct engine *e = engine_new(m, &o, &err);
    if (!e) return fprintf(stderr, "%s\n", err.text), 1;
    if (strcmp(argv[1], "tokens") == 0)
        for (int i = 3; rc == 0 && i < argc; i++) rc = tokens(m, argv[i]);
    else if (n < 1)
        rc = 2;
    else
        rc = long_texts ? needle(m, e, n) : judge(m, e, n);
    engine_free(e);
    pool_free(pool);
    model_close(m);
    return rc;
}
