/*
 * training_data: hashes of the data that an adapter was trained on, in memory and as a file of the
 * adapter's directory, which PEFT ignores.
 *
 * training_data.hashes, little-endian:
 *
 *     0    "SHOALTD" and the version, a byte 1
 *     8    u64 number of questions, u64 number of n-grams
 *     24   u64 limit of the questions, u64 limit of the n-grams: see struct hash_list
 *     40   u64 the questions, then the n-grams, both ascending
 *
 * The file has no text and at most 40 + 8 · (65,536 + 32,768) bytes. A file of another
 * form is ignored with a warning, because the adapter is intact without it.
 */
#include "adapter/internal.h"
#include "hub/hub.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char magic[8] = "SHOALTD\1";
struct file_header {
    char magic[8];
    uint64_t n_questions, n_ngrams, question_limit, ngram_limit;
};
_Static_assert(sizeof(struct file_header) == 40, "the header has no padding");
enum { FILE_MAX_SIZE = 40 + 8 * (TRAINING_QUESTIONS_MAX + TRAINING_NGRAMS_MAX) };

/* lists */

static int compare_hashes(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

void hash_list_normalize(struct hash_list *l, int64_t max) {
    int64_t n = 0;
    if (l->n > 1) qsort(l->v, (size_t)l->n, sizeof *l->v, compare_hashes);
    for (int64_t i = 0; i < l->n && l->v[i] <= l->limit; i++)
        if (n == 0 || l->v[n - 1] != l->v[i]) l->v[n++] = l->v[i];
    if (n > max) {
        n = max;
        l->limit = l->v[n - 1];
    }
    l->n = n;
}

bool hash_list_has(const struct hash_list *l, uint64_t hash) {
    return l->n > 0 && bsearch(&hash, l->v, (size_t)l->n, sizeof *l->v, compare_hashes);
}

static struct hash_list hash_list_union(const struct hash_list *a, const struct hash_list *b,
                                        int64_t max) {
    struct hash_list u = {.n = a->n + b->n, .limit = MIN(a->limit, b->limit)};
    u.v = xmalloc((size_t)(u.n + 1) * sizeof *u.v);
    if (a->n) memcpy(u.v, a->v, (size_t)a->n * sizeof *u.v);
    if (b->n) memcpy(u.v + a->n, b->v, (size_t)b->n * sizeof *u.v);
    hash_list_normalize(&u, max);
    return u;
}

/* training data */

struct training_data *training_data_new(struct hash_list questions, struct hash_list ngrams) {
    struct training_data *t = xmalloc(sizeof *t);
    *t = (struct training_data){.refs = 1, .questions = questions, .ngrams = ngrams};
    return t;
}

struct training_data *training_data_retain(struct training_data *t) {
    if (t) __atomic_add_fetch(&t->refs, 1, __ATOMIC_RELAXED);
    return t;
}

void training_data_release(struct training_data *t) {
    if (!t || __atomic_sub_fetch(&t->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    free(t->questions.v);
    free(t->ngrams.v);
    free(t);
}

void adapter_add_training_data(struct adapter *a, struct training_data *t) {
    struct training_data *old = a->training_data;
    if (!t || t == old) return;
    a->training_data =
        old ? training_data_new(
                  hash_list_union(&old->questions, &t->questions, TRAINING_QUESTIONS_MAX),
                  hash_list_union(&old->ngrams, &t->ngrams, TRAINING_NGRAMS_MAX))
            : training_data_retain(t);
    training_data_release(old);
}

/* the file */

/* Takes the hashes at *p, which advances; false: the list has another form. */
static bool hash_list_parse(struct hash_list *l, uint64_t n, uint64_t limit, const char **p) {
    *l = (struct hash_list){.n = (int64_t)n, .limit = limit};
    l->v = xmalloc(((size_t)n + 1) * sizeof *l->v);
    memcpy(l->v, *p, (size_t)n * sizeof *l->v);
    *p += n * sizeof *l->v;
    for (uint64_t i = 0; i < n; i++)
        if (l->v[i] > limit || (i > 0 && l->v[i] <= l->v[i - 1])) return false;
    return true;
}

/* NULL: the bytes have another form. */
static struct training_data *training_data_parse(const struct buf *file) {
    struct file_header h;
    if (file->len < sizeof h) return NULL;
    memcpy(&h, file->data, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0 || h.n_questions > TRAINING_QUESTIONS_MAX ||
        h.n_ngrams > TRAINING_NGRAMS_MAX ||
        file->len != sizeof h + (h.n_questions + h.n_ngrams) * sizeof(uint64_t))
        return NULL;
    const char *p = file->data + sizeof h;
    struct hash_list questions, ngrams = {0};
    if (hash_list_parse(&questions, h.n_questions, h.question_limit, &p) &&
        hash_list_parse(&ngrams, h.n_ngrams, h.ngram_limit, &p))
        return training_data_new(questions, ngrams);
    free(questions.v);
    free(ngrams.v);
    return NULL;
}

static struct training_data *training_data_read_file(const char *path) {
    struct buf file = {0};
    struct error err = {0};
    struct training_data *t = NULL;
    int rc = file_read(path, FILE_MAX_SIZE, &file, &err);
    if (rc == OK && !(t = training_data_parse(&file)))
        rc = error_set(&err, ERR_FORMAT, "'%s' is damaged", path);
    if (rc != OK)
        log_warn("the adapter's training data are unknown, so questions from them are not found: "
                 "%s",
                 err.text);
    buf_release(&file);
    return t;
}

struct training_data *training_data_read(const char *dir) {
    struct error ignored; // the adapter has been read from there
    char *pulled = hub_is_name(dir) ? hub_cached_path(dir, &ignored) : NULL,
         *path = path_join(pulled ? pulled : dir, TRAINING_DATA_FILE);
    struct training_data *t = path_exists(path) ? training_data_read_file(path) : NULL;
    free(pulled);
    free(path);
    return t;
}

static int file_remove(const char *path, struct error *err) {
    if (unlink(path) == 0 || errno == ENOENT) return OK;
    return error_errno(err, "cannot remove '%s'", path);
}

static void hashes_add(struct buf *out, const struct hash_list *l) {
    buf_add(out, l->v, (size_t)l->n * sizeof *l->v);
}

int training_data_write(const struct training_data *t, const char *dir, struct error *err) {
    char *path = path_join(dir, TRAINING_DATA_FILE);
    int rc;
    if (t) {
        struct file_header h = {.n_questions = (uint64_t)t->questions.n,
                                .n_ngrams = (uint64_t)t->ngrams.n,
                                .question_limit = t->questions.limit,
                                .ngram_limit = t->ngrams.limit};
        struct buf file = {0};
        memcpy(h.magic, magic, sizeof magic);
        buf_add(&file, &h, sizeof h);
        hashes_add(&file, &t->questions);
        hashes_add(&file, &t->ngrams);
        rc = file_write(path, file.data, file.len, err);
        buf_release(&file);
    } else {
        rc = file_remove(path, err);
    }
    free(path);
    return rc;
}

int training_data_copy(const char *from, const char *to, struct error *err) {
    char *source = path_join(from, TRAINING_DATA_FILE), *old = path_join(to, TRAINING_DATA_FILE);
    int rc =
        path_exists(source) ? file_copy(from, to, TRAINING_DATA_FILE, err) : file_remove(old, err);
    free(source);
    free(old);
    return rc;
}
