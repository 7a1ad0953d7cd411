/*
 * lint: reports the content of a training file before training begins.
 *
 * It uses the digests that the loaders compute for every sample, so it reads no file and stores no
 * text. Samples are compared by two 64-bit hashes: of their exact content, and of their content
 * after text_normalize (without case, width and white space). A hash collision would cause a wrong
 * line in a report. Similar sentences are not detected.
 *
 * text_normalize drops blanks next to characters of scripts that are written without blanks. So
 * Japanese and Chinese texts match even if their lines are broken at other places.
 */
#include "data/data.h"
#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>

/* hashes */

/* Appends one message; `fold`: after text_normalize. Because of the separators, different lists of
 * messages have different bytes. */
static int message_add(struct buf *out, const char *role, const char *text, bool fold,
                       struct error *err) {
    size_t len = strlen(text);
    int rc = buf_reserve(out, strlen(role) + 2 * len + 8, err);
    if (rc != OK) return rc;
    buf_puts(out, role);
    buf_puts(out, "\x1f");
    if (fold)
        text_normalize(text, len, out);
    else
        buf_add(out, text, len);
    buf_puts(out, "\x1e");
    return OK;
}

/* Index of the assistant's last message; 0 without one. */
static int last_answer_index(const struct chat_message *msgs, int n) {
    int last = 0;
    for (int i = 0; i < n; i++)
        if (strcmp(msgs[i].role, "assistant") == 0) last = i;
    return last;
}

int sample_digest_compute(const struct chat_message *msgs, int n, struct sample_digest *out,
                          struct error *err) {
    struct buf exact_text = {0}, near_text = {0}, prompt_text = {0};
    int rc = OK, answer_index = last_answer_index(msgs, n);
    for (int i = 0; rc == OK && i < n; i++) {
        const char *role = msgs[i].role, *text = msgs[i].content;
        rc = message_add(&exact_text, role, text, false, err);
        if (rc == OK) rc = message_add(&near_text, role, text, true, err);
        /* system messages are left out: the same question to another persona is the same prompt */
        if (rc == OK && i < answer_index && strcmp(role, "system") != 0 && *text)
            rc = message_add(&prompt_text, "", text, true, err);
    }
    if (rc == OK) {
        out->exact_hash = hash_fnv1a(exact_text.data, exact_text.len);
        out->near_hash = hash_fnv1a(near_text.data, near_text.len);
        out->prompt_hash = prompt_text.len ? hash_fnv1a(prompt_text.data, prompt_text.len) : 0;
    }
    buf_release(&exact_text);
    buf_release(&near_text);
    buf_release(&prompt_text);
    return rc;
}

/* finding duplicates */

struct hash_key {
    uint64_t hash;
    int index;
};

static int compare_keys(const void *a, const void *b) {
    const struct hash_key *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* The hashes at `offset` in the digests of all samples, sorted; among equal hashes the earliest
 * sample comes first. malloc'ed. */
static struct hash_key *sorted_keys_new(const struct dataset *d, size_t offset, struct error *err) {
    struct hash_key *keys = try_calloc((size_t)MAX(d->n_read, 1), sizeof *keys, err);
    if (!keys) return NULL;
    for (int i = 0; i < d->n_read; i++) {
        memcpy(&keys[i].hash, (const char *)&d->digests[i] + offset, sizeof keys[i].hash);
        keys[i].index = i;
    }
    qsort(keys, (size_t)d->n_read, sizeof *keys, compare_keys);
    return keys;
}

/* The index of the earliest sample with this hash; -1: no sample has it. */
static int sorted_keys_find(const struct hash_key *keys, int n, uint64_t hash) {
    int low = 0, high = n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (keys[mid].hash < hash)
            low = mid + 1;
        else
            high = mid;
    }
    return low < n && keys[low].hash == hash ? keys[low].index : -1;
}

/* Counts a match of sample a with sample b, and keeps the lines of the first match. */
static void match_add(struct lint_matches *p, const struct sample_digest *a,
                      const struct sample_digest *b) {
    if (p->n++) return;
    p->line = a->line;
    p->other = b->line;
}

static void train_duplicates_count(const struct dataset *d, const struct hash_key *exact_keys,
                                   const struct hash_key *near_keys, struct lint *out) {
    for (int i = 0; i < d->n_read; i++) {
        const struct sample_digest *digest = &d->digests[i];
        int exact_match = sorted_keys_find(exact_keys, d->n_read, digest->exact_hash),
            near_match = sorted_keys_find(near_keys, d->n_read, digest->near_hash);
        if (exact_match < i)
            match_add(&out->exact, digest, &d->digests[exact_match]);
        else if (near_match < i)
            match_add(&out->near, digest, &d->digests[near_match]);
    }
}

static void contamination_count(const struct dataset *d, const struct dataset *eval,
                                const struct hash_key *near_keys,
                                const struct hash_key *prompt_keys, struct lint *out) {
    for (int i = 0; i < eval->n_read; i++) {
        const struct sample_digest *eval_digest = &eval->digests[i];
        int sample_match = sorted_keys_find(near_keys, d->n_read, eval_digest->near_hash);
        int prompt_match = eval_digest->prompt_hash
                               ? sorted_keys_find(prompt_keys, d->n_read, eval_digest->prompt_hash)
                               : -1;
        if (sample_match >= 0)
            match_add(&out->eval_samples, &d->digests[sample_match], eval_digest);
        if (prompt_match >= 0)
            match_add(&out->eval_prompts, &d->digests[prompt_match], eval_digest);
    }
}

static int duplicates_count(const struct dataset *d, const struct dataset *eval, struct lint *out,
                            struct error *err) {
    struct hash_key *exact_keys =
        sorted_keys_new(d, offsetof(struct sample_digest, exact_hash), err);
    struct hash_key *near_keys =
        exact_keys ? sorted_keys_new(d, offsetof(struct sample_digest, near_hash), err) : NULL;
    struct hash_key *prompt_keys =
        near_keys ? sorted_keys_new(d, offsetof(struct sample_digest, prompt_hash), err) : NULL;
    if (prompt_keys) train_duplicates_count(d, exact_keys, near_keys, out);
    if (prompt_keys && eval) contamination_count(d, eval, near_keys, prompt_keys, out);
    int rc = prompt_keys ? OK : err->code;
    free(exact_keys);
    free(near_keys);
    free(prompt_keys);
    return rc;
}

/* the report */

static int compare_lengths(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

struct length_stats length_stats_compute(int32_t *v, int n) {
    struct length_stats l = {.n = n};
    if (n == 0) return l;
    qsort(v, (size_t)n, sizeof *v, compare_lengths);
    for (int i = 0; i < n; i++) l.tokens += v[i];
    l.shortest = v[0];
    l.median = v[(n - 1) / 2];
    l.p95 = v[((int64_t)n * 95 + 99) / 100 - 1];
    l.longest = v[n - 1];
    return l;
}

static int lengths_measure(const struct dataset *d, struct lint *out, struct error *err) {
    int n = d->n_read;
    int32_t *v = n ? try_calloc((size_t)n, sizeof *v, err) : NULL;
    if (!v) return n ? err->code : OK;
    for (int i = 0; i < n; i++) v[i] = d->digests[i].tokens;
    struct length_stats l = length_stats_compute(v, n);
    out->shortest = l.shortest;
    out->median = l.median;
    out->p95 = l.p95;
    out->longest = l.longest;
    free(v);
    return OK;
}

int lint_dataset(const struct dataset *d, const struct dataset *eval, struct lint *out,
                 struct error *err) {
    *out = (struct lint){.form = d->form,
                         .read = d->n_read,
                         .kept = d->n,
                         .cut = (int)d->cut,
                         .dropped = (int)d->dropped,
                         .n_eval = eval ? eval->n_read : 0,
                         .tokens = d->tokens,
                         .targets = d->targets};
    int rc = lengths_measure(d, out, err);
    return rc == OK ? duplicates_count(d, eval, out, err) : rc;
}

static double percent(double part, double all) {
    return all > 0 ? 100 * part / all : 0;
}

static void lengths_text(const struct lint *l, struct buf *out) {
    buf_printf(out, "%d samples", l->kept);
    if (l->form) buf_printf(out, " in the form '%s'", l->form);
    buf_printf(out, ", %lld tokens", (long long)l->tokens);
    if (l->targets) // prompts have no targets
        buf_printf(out, ", %lld of them learned (%.1f %%)", (long long)l->targets,
                   percent((double)l->targets, (double)l->tokens));
    buf_printf(out, "; lengths %d to %d, median %d, 95 %% up to %d", l->shortest, l->longest,
               l->median, l->p95);
}

/* Calls `fn` for each finding, with one line of text and whether it is a warning. */
static void findings_each(const struct lint *l,
                          void (*fn)(void *ctx, const char *text, bool is_warning), void *ctx) {
    static const char near_suffix[] = " except for case, width or white space";
    const struct {
        const struct lint_matches *matches;
        const char *what, *one, *many, *more;
        bool eval;
    } rows[] = {
        {&l->exact, "samples", "repeats an earlier one", "repeat earlier ones", "", false},
        {&l->near, "samples", "repeats an earlier one", "repeat earlier ones", near_suffix, false},
        {&l->eval_samples, "evaluation samples", "is in the data", "are in the data", "", true},
        {&l->eval_prompts, "evaluation prompts", "is in the data", "are in the data", "", true},
    };
    char text[256];
    if (l->cut) {
        snprintf(text, sizeof text,
                 "%d of %d samples were cut (%.1f %%), %d of them dropped: no target was left",
                 l->cut, l->read, percent(l->cut, l->read), l->dropped);
        fn(ctx, text, true);
    }
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        const struct lint_matches *matches = rows[i].matches;
        bool eval = rows[i].eval;
        if (!matches->n) continue;
        snprintf(text, sizeof text, "%d of %d %s %s%s (the first: line %d, as in %sline %d)",
                 matches->n, eval ? l->n_eval : l->read, rows[i].what,
                 matches->n == 1 ? rows[i].one : rows[i].many, rows[i].more, matches->line,
                 eval ? "the evaluation's " : "", matches->other);
        fn(ctx, text, eval);
    }
}

static void finding_append(void *ctx, const char *text, bool is_warning) {
    buf_printf(ctx, "%s%s\n", is_warning ? "warning: " : "", text);
}

void lint_text(const struct lint *l, struct buf *out) {
    lengths_text(l, out);
    buf_puts(out, "\n");
    findings_each(l, finding_append, out);
    if (l->n_eval && !l->eval_prompts.n && !l->eval_samples.n)
        buf_printf(out, "none of the %d evaluation samples is in the data\n", l->n_eval);
}

static void finding_log(void *ctx, const char *text, bool is_warning) {
    (is_warning ? log_warn : log_info)("%s: %s", (const char *)ctx, text);
}

void lint_log(const struct lint *l, const char *name) {
    struct buf text = {0};
    lengths_text(l, &text);
    log_info("%s: %s", name, text.data);
    findings_each(l, finding_log, (void *)(uintptr_t)name);
    buf_release(&text);
}

static json_t *matches_json(const struct lint_matches *p) {
    if (!p->n) return json_pack("{s:i}", "count", 0);
    return json_pack("{s:i,s:[i,i]}", "count", p->n, "first_lines", p->line, p->other);
}

json_t *lint_json(const struct lint *l) {
    json_t *v =
        json_pack("{s:i,s:i,s:i,s:i,s:I,s:I,s:{s:i,s:i,s:i,s:i},s:o,s:o}", "samples", l->read,
                  "kept", l->kept, "cut", l->cut, "dropped", l->dropped, "tokens",
                  (json_int_t)l->tokens, "targets", (json_int_t)l->targets, "lengths", "min",
                  l->shortest, "median", l->median, "p95", l->p95, "max", l->longest, "duplicates",
                  matches_json(&l->exact), "near_duplicates", matches_json(&l->near));
    if (l->form) json_object_set_new(v, "form", json_string(l->form));
    if (l->n_eval)
        json_object_set_new(v, "eval",
                            json_pack("{s:i,s:o,s:o}", "samples", l->n_eval, "in_data",
                                      matches_json(&l->eval_samples), "prompts_in_data",
                                      matches_json(&l->eval_prompts)));
    return v;
}
