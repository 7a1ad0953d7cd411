/*
 * contamination: the questions of training data as hashes, and the questions of an evaluation that
 * are among them.
 *
 * A question is the text before an answer, without system messages, in the form of text_normalize
 * and without a label such as "Question:" or "Answer:" at its ends. Two questions are the same if
 * their 64-bit hashes are equal. A question is a near duplicate if at least half of its n-grams of
 * three words (six characters of a Chinese or Japanese question) are in the data. The data keep
 * only n-grams that occur in one question: n-grams of several questions are a template or a common
 * phrase, and say nothing about one of them. At least four n-grams must be in the data, so a short
 * question is no near duplicate.
 *
 * Memory is bounded: hashes are collected in arrays of fixed size, which are reduced to the
 * smallest hashes when they are full (struct hash_list).
 */
#include "data/internal.h"
#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>

enum {
    NGRAM_WORDS = 3,
    NGRAM_CHARS = 6, /* in scripts that are written without blanks, where a word is a character */
    NGRAMS_MIN_FOUND = 4,
    TURN_MAX_BYTES = 65536, /* conversations are read up to here */
    EXAMPLE_MAX_BYTES = 80,
    PENDING_QUESTIONS = 2 * TRAINING_QUESTIONS_MAX,
    PENDING_NGRAMS = 4 * TRAINING_NGRAMS_MAX,
};

/* questions */

struct turn { /* a question and its answer, normalised; the answer may be empty */
    struct buf question, answer;
};

static void turn_release(struct turn *t) {
    buf_release(&t->question);
    buf_release(&t->answer);
}

/* Moves *begin and *end past the labels and blanks at the ends of a normalised text. */
static void labels_strip(const char **begin, const char **end) {
    static const char *const before[] = {"question:", "q:", "質問:", "問題:", "问题:"},
                             *const after[] = {"answer:", "a:", "回答:", "答え:", "答案:"};
    for (size_t i = 0; i < ARRAY_LEN(before); i++) {
        size_t n = strlen(before[i]), m = strlen(after[i]);
        if ((size_t)(*end - *begin) >= n && memcmp(*begin, before[i], n) == 0) *begin += n;
        if ((size_t)(*end - *begin) >= m && memcmp(*end - m, after[i], m) == 0) *end -= m;
    }
    while (*begin < *end && **begin == ' ') ++*begin;
    while (*begin < *end && (*end)[-1] == ' ') --*end;
}

static void question_normalize(const char *text, struct buf *out) {
    struct buf all = {0};
    text_normalize(text, strlen(text), &all);
    buf_puts(&all, "");
    const char *begin = all.data, *end = begin + all.len;
    labels_strip(&begin, &end);
    out->len = 0;
    buf_add(out, begin, (size_t)(end - begin));
    buf_release(&all);
}

static void turn_set(struct turn *t, const char *question, const char *answer) {
    question_normalize(question, &t->question);
    t->answer.len = 0;
    text_normalize(answer, strlen(answer), &t->answer);
}

static uint64_t question_hash(const struct turn *t) {
    return hash_fnv1a(t->question.data, t->question.len);
}

static uint64_t answered_hash(const struct turn *t) {
    struct buf both = {0};
    buf_add(&both, t->question.data, t->question.len);
    buf_puts(&both, "\x1e");
    buf_add(&both, t->answer.data, t->answer.len);
    uint64_t hash = hash_fnv1a(both.data, both.len);
    buf_release(&both);
    return hash;
}

/* The hashes of a normalised question's n-grams, malloc'ed. */
static uint64_t *question_ngrams(const struct buf *question, int *n) {
    size_t dense = 0; // bytes of characters from U+3000 on
    for (size_t i = 0; i < question->len; i++) dense += (uint8_t)question->data[i] >= 0xE3 ? 3 : 0;
    return text_ngrams(question->data, 2 * dense > question->len ? NGRAM_CHARS : NGRAM_WORDS, n);
}

/* Called for a turn whose question is not empty. */
typedef void (*turn_fn)(void *ctx, const struct turn *t);

static void turn_visit(struct turn *t, const char *question, const char *answer, turn_fn fn,
                       void *ctx) {
    turn_set(t, question, answer);
    if (t->question.len && fn) fn(ctx, t);
}

/* Each turn of the assistant answers the messages before it; a conversation that ends with the user
 * ends with a question. *t receives the last turn. */
static void messages_visit(const json_t *messages, struct turn *t, turn_fn fn, void *ctx) {
    struct buf text = {0};
    const json_t *m;
    size_t i;
    bool is_open = false; /* the text ends with a message that is not answered */
    json_array_foreach ((json_t *)(uintptr_t)messages, i, m) {
        const char *role = json_get_string(m, "role"), *content = json_get_string(m, "content");
        if (!*content || strcmp(role, "system") == 0) continue;
        if (text.len > TURN_MAX_BYTES) break;
        bool is_answer = strcmp(role, "assistant") == 0;
        if (is_answer && text.len) turn_visit(t, text.data, content, fn, ctx);
        is_open = !is_answer;
        if (text.len) buf_puts(&text, "\n");
        buf_puts(&text, content);
    }
    if (is_open) turn_visit(t, text.data, "", fn, ctx);
    buf_release(&text);
}

/* Visits the turns of a sample, a preference pair or a prompt. A text is one question. */
static void sample_visit(const json_t *value, const char *form, struct turn *t, turn_fn fn,
                         void *ctx) {
    json_t *from;
    const json_t *found = sample_question_find(value, form, &from);
    if (json_is_string(found))
        turn_visit(t, json_string_value(found), json_get_string(from, "completion"), fn, ctx);
    else
        messages_visit(found, t, fn, ctx);
    json_decref(from);
}

/* collecting */

struct ngram {
    uint64_t hash, question; /* question: hash of the first question of its sample */
    bool is_shared;          /* other samples have it too */
};
struct collector {
    const char *form;
    struct hash_list questions; /* [PENDING_QUESTIONS] not normalised */
    struct ngram *ngrams;       /* [PENDING_NGRAMS] */
    int64_t n_ngrams;
    uint64_t ngram_limit;
    uint64_t sample; /* hash of the sample's first question; 0: none yet */
};

static int compare_ngrams(const void *a, const void *b) {
    const struct ngram *x = a, *y = b;
    return x->hash < y->hash ? -1 : x->hash > y->hash;
}

/* Sorts and merges equal n-grams, and drops the largest hashes if more than `max` remain. */
static void ngrams_reduce(struct collector *c, int64_t max) {
    int64_t n = 0;
    if (c->n_ngrams > 1) qsort(c->ngrams, (size_t)c->n_ngrams, sizeof *c->ngrams, compare_ngrams);
    for (int64_t i = 0; i < c->n_ngrams; i++) {
        const struct ngram *g = &c->ngrams[i];
        struct ngram *last = n ? &c->ngrams[n - 1] : NULL;
        if (last && last->hash == g->hash)
            last->is_shared |= g->is_shared || g->question != last->question;
        else
            c->ngrams[n++] = *g;
    }
    if (n > max) {
        n = max;
        c->ngram_limit = c->ngrams[n - 1].hash;
    }
    c->n_ngrams = n;
}

static void ngram_add(struct collector *c, uint64_t hash) {
    if (hash > c->ngram_limit) return;
    if (c->n_ngrams == PENDING_NGRAMS) ngrams_reduce(c, PENDING_NGRAMS / 2);
    if (hash <= c->ngram_limit) c->ngrams[c->n_ngrams++] = (struct ngram){hash, c->sample, false};
}

static void question_add(struct collector *c, uint64_t hash) {
    if (hash > c->questions.limit) return;
    if (c->questions.n == PENDING_QUESTIONS)
        hash_list_normalize(&c->questions, TRAINING_QUESTIONS_MAX);
    if (hash <= c->questions.limit) c->questions.v[c->questions.n++] = hash;
}

static void turn_collect(void *ctx, const struct turn *t) {
    struct collector *c = ctx;
    uint64_t hash = question_hash(t);
    if (!c->sample) c->sample = hash;
    question_add(c, hash);
    if (t->answer.len) question_add(c, answered_hash(t));
}

/* The n-grams of a sample are those of its last question, which begins with the earlier ones. */
static int sample_collect(void *ctx, const json_t *value, int line, struct error *err) {
    struct collector *c = ctx;
    struct turn t = {0};
    (void)line, (void)err;
    c->sample = 0;
    sample_visit(value, c->form, &t, turn_collect, c);
    if (t.question.len) {
        int n;
        uint64_t *v = question_ngrams(&t.question, &n);
        for (int i = 0; i < n; i++) ngram_add(c, v[i]);
        free(v);
    }
    turn_release(&t);
    return OK;
}

static struct training_data *collector_finish(struct collector *c) {
    struct hash_list ngrams = {.limit = UINT64_MAX};
    ngrams_reduce(c, PENDING_NGRAMS);
    ngrams.v = xmalloc(((size_t)c->n_ngrams + 1) * sizeof *ngrams.v);
    for (int64_t i = 0; i < c->n_ngrams; i++)
        if (!c->ngrams[i].is_shared) ngrams.v[ngrams.n++] = c->ngrams[i].hash;
    ngrams.limit = c->ngram_limit;
    hash_list_normalize(&ngrams, TRAINING_NGRAMS_MAX);
    hash_list_normalize(&c->questions, TRAINING_QUESTIONS_MAX);
    struct training_data *t = training_data_new(c->questions, ngrams);
    c->questions.v = NULL; // `t` owns them now
    return t;
}

struct training_data *training_data_of_file(const char *path, const char *form, struct error *err) {
    struct collector c = {.form = form, .questions.limit = UINT64_MAX, .ngram_limit = UINT64_MAX};
    struct training_data *t = NULL;
    c.questions.v = try_calloc(PENDING_QUESTIONS, sizeof *c.questions.v, err);
    c.ngrams = try_calloc(PENDING_NGRAMS, sizeof *c.ngrams, err);
    if (c.questions.v && c.ngrams && sample_file_each(path, sample_collect, &c, err) == OK)
        t = collector_finish(&c);
    free(c.questions.v);
    free(c.ngrams);
    return t;
}

/* comparing */

static bool is_near_duplicate(const struct training_data *t, const struct buf *question) {
    struct hash_list ngrams = {.limit = t->ngrams.limit};
    int n;
    int64_t found = 0;
    ngrams.v = question_ngrams(question, &n);
    ngrams.n = n;
    hash_list_normalize(&ngrams, n);
    for (int64_t i = 0; i < ngrams.n; i++) found += hash_list_has(&t->ngrams, ngrams.v[i]);
    bool is_near = found >= NGRAMS_MIN_FOUND && 2 * found >= ngrams.n;
    free(ngrams.v);
    return is_near;
}

/* The beginning of a question, without control characters. */
static char *example_text(const struct buf *question) {
    struct buf text = {0};
    size_t n = utf8_complete_len(question->data, MIN(question->len, EXAMPLE_MAX_BYTES));
    buf_add_sanitized(&text, question->data, n);
    buf_puts(&text, n < question->len ? "…" : "");
    return text.data;
}

static void turn_count(struct contamination *c, const struct training_data *t,
                       const struct turn *turn, bool near) {
    c->of++;
    if (!t || !turn->question.len) return;
    bool is_same = hash_list_has(&t->questions, question_hash(turn));
    if (!is_same && !(near && is_near_duplicate(t, &turn->question))) return;
    c->questions++;
    c->near += !is_same;
    c->answered +=
        is_same && (!turn->answer.len || hash_list_has(&t->questions, answered_hash(turn)));
    if (!c->example) c->example = example_text(&turn->question);
}

void contamination_release(struct contamination *c) {
    free(c->example);
    *c = (struct contamination){0};
}

void contamination_add(struct contamination *c, const struct training_data *t, const char *question,
                       const json_t *chat, bool near) {
    struct turn turn = {0};
    if (chat)
        messages_visit(json_object_get(chat, "messages"), &turn, NULL, NULL);
    else
        turn_set(&turn, question, "");
    turn_count(c, t, &turn, near);
    turn_release(&turn);
}

struct file_check {
    struct contamination *out;
    const struct training_data *t;
};

static int sample_check(void *ctx, const json_t *value, int line, struct error *err) {
    struct file_check *k = ctx;
    struct turn turn = {0};
    (void)line, (void)err;
    sample_visit(value, NULL, &turn, NULL, NULL);
    turn_count(k->out, k->t, &turn, true);
    turn_release(&turn);
    return OK;
}

int contamination_of_file(struct contamination *out, const struct training_data *t,
                          const char *path, struct error *err) {
    struct file_check k = {out, t};
    *out = (struct contamination){0};
    return sample_file_each(path, sample_check, &k, err);
}

/* reports */

/* `near` is false for the questions of a family, see contamination_add. */
static void task_check(struct contamination *out, const struct training_data *t,
                       const struct eval_task *task) {
    bool near = task->family < 0;
    *out = (struct contamination){0};
    for (int64_t i = 0; i < task->n_questions; i++) {
        struct eval_question scratch;
        const struct eval_question *q = eval_task_question(task, i, &scratch);
        const char *text = q->context ? q->context : q->contexts[MAX(q->correct, 0)];
        contamination_add(out, t, text ? text : "", q->chat, near);
        if (q == &scratch) eval_question_release(&scratch);
    }
}

json_t *contamination_report(const struct eval_task *task, const char *name,
                             const struct adapter *a) {
    struct contamination c;
    json_t *v = NULL;
    if (!a || !a->training_data) return NULL;
    task_check(&c, a->training_data, task);
    if (c.questions) {
        log_warn("%s: %lld of %lld questions are in the training data of '%s' (such as '%s'), %lld "
                 "of them with other words: its answers to them say nothing about new questions",
                 task->name, (long long)c.questions, (long long)c.of, name, c.example,
                 (long long)c.near);
        v = json_pack("{s:s,s:I,s:I,s:I,s:o}", "adapter", name, "questions",
                      (json_int_t)c.questions, "near", (json_int_t)c.near, "of", (json_int_t)c.of,
                      "example", json_string(c.example));
    }
    contamination_release(&c);
    return v;
}
