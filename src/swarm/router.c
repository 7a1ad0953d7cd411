/*
 * router: the features of a question, the choice of an agent, and the file of a router.
 * router_fit.c fits the weights.
 *
 * Features: n-grams of 1 to 4 characters, words and pairs of words, hashed to ROUTER_DIM counts
 * with signs (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning"), scaled
 * to length 1. Characters are in lower case and a digit is '0', since the length of a number may
 * decide which agent is right, but its digits do not. A file from another source can make a router
 * choose badly, and nothing else: sizes are checked before memory is allocated, numbers are finite.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unicase.h>
#include <unictype.h>
#include <unistr.h>

enum { CHARS_MAX = 4 };
#define FORMAT "shoal-router-1"
/* Bounds what a sum of products can be; a fit has weights far below. */
#define WEIGHT_MAX 1e6

/* features */

/* Drops the frame that prompt_of_question (eval.h) adds to a bare question, so that a question has
 * the same features in a task and in a chat. Returns the number of bytes that are left from *text
 * on. */
static size_t bare_question(const char **text) {
    static const char before[] = "Question:", after[] = "\nAnswer:";
    size_t n = strlen(*text), head = sizeof before - 1, tail = sizeof after - 1;
    if (n < head + tail || strncmp(*text, before, head) != 0 ||
        strcmp(*text + n - tail, after) != 0)
        return n;
    *text += head;
    return n - head - tail;
}

/* The characters of a text: in lower case, '0' for digits, one blank for white space, which is also
 * at both ends. malloc'ed. */
static ucs4_t *characters(const char *text, size_t *n) {
    size_t len = bare_question(&text);
    ucs4_t *v = xmalloc((len + 2) * sizeof *v), c;
    *n = 0;
    v[(*n)++] = ' ';
    for (size_t pos = 0; pos < len;) {
        pos += (size_t)u8_mbtouc(&c, (const uint8_t *)text + pos, len - pos);
        if (uc_is_property_white_space(c)) {
            if (v[*n - 1] != ' ') v[(*n)++] = ' ';
        } else {
            v[(*n)++] = uc_digit_value(c) >= 0 ? '0' : uc_tolower(c);
        }
    }
    if (v[*n - 1] != ' ') v[(*n)++] = ' ';
    return v;
}

static bool is_word_character(ucs4_t c) {
    return uc_is_general_category_withtable(c, UC_CATEGORY_MASK_L | UC_CATEGORY_MASK_N |
                                                   UC_CATEGORY_MASK_M);
}

static void count_hash(double counts[ROUTER_DIM], uint64_t hash) {
    counts[hash & (ROUTER_DIM - 1)] += hash >> 32 & 1 ? -1 : 1;
}

static void count_words(double counts[ROUTER_DIM], const ucs4_t *v, size_t n) {
    uint64_t previous = 0;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && is_word_character(v[end]); end++) continue;
        if (end == i) {
            end++;
            continue;
        }
        uint64_t pair[2] = {previous, hash_fnv1a(v + i, (end - i) * sizeof *v)};
        count_hash(counts, hash_fnv1a(pair + 1, sizeof pair[1]));
        count_hash(counts, hash_fnv1a(pair, sizeof pair));
        previous = pair[1];
    }
}

void router_features_init(struct router_features *f, const char *text) {
    double counts[ROUTER_DIM] = {0}, squares = 0;
    size_t n;
    ucs4_t *v = characters(text, &n);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 1; k <= CHARS_MAX && i + k <= n; k++)
            count_hash(counts, hash_fnv1a(v + i, k * sizeof *v));
    count_words(counts, v, n);
    free(v);
    f->n = 0;
    for (int j = 0; j < ROUTER_DIM; j++) {
        squares += counts[j] * counts[j];
        f->n += counts[j] != 0;
    }
    f->v = xmalloc((size_t)MAX(f->n, 1) * sizeof *f->v);
    for (int j = 0, k = 0; j < ROUTER_DIM; j++)
        if (counts[j] != 0)
            f->v[k++] = (struct router_feature){.index = j + 1,
                                                .value = (float)(counts[j] / sqrt(squares))};
}

double router_logit(const double *weights, const struct router_features *f) {
    double sum = weights[0];
    for (int k = 0; k < f->n; k++) sum += weights[f->v[k].index] * (double)f->v[k].value;
    return sum;
}

int router_route(const struct router *r, const char *question, double *prob) {
    struct router_features f;
    double best_logit = 0;
    int best = 0;
    router_features_init(&f, question);
    for (int a = 0; a < r->n_agents; a++) {
        double z = router_logit(r->weights + (size_t)a * ROUTER_WEIGHTS, &f);
        if (a == 0 || z > best_logit) {
            best = a;
            best_logit = z;
        }
        if (prob) prob[a] = 1 / (1 + math_exp(-z));
    }
    free(f.v);
    return best;
}

/* files */

static int agents_read(struct router *r, const json_t *list, struct error *err) {
    size_t n = json_array_size(list);
    if (n < 1 || n > TEAM_MAX)
        return error_set(err, ERR_FORMAT, "a list of 1 to %d names is expected in 'agents'",
                         TEAM_MAX);
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (!name || !*name)
            return error_set(err, ERR_FORMAT, "a name is expected at 'agents.%zu'", i);
        r->names[r->n_agents++] = xstrdup(name);
    }
    return OK;
}

static int weights_read(struct router *r, const json_t *list, struct error *err) {
    if (json_array_size(list) != (size_t)r->n_agents)
        return error_set(err, ERR_FORMAT, "weights for each of %d agents are expected in 'weights'",
                         r->n_agents);
    for (int a = 0; a < r->n_agents; a++)
        if (json_array_size(json_array_get(list, (size_t)a)) != ROUTER_WEIGHTS)
            return error_set(err, ERR_FORMAT, "%d numbers are expected at 'weights.%d'",
                             ROUTER_WEIGHTS, a);
    r->weights = xcalloc((size_t)r->n_agents * ROUTER_WEIGHTS, sizeof *r->weights);
    for (int a = 0; a < r->n_agents; a++)
        for (int j = 0; j < ROUTER_WEIGHTS; j++) {
            const json_t *v = json_array_get(json_array_get(list, (size_t)a), (size_t)j);
            double x = json_number_value(v);
            if (!json_is_number(v) || !(fabs(x) <= WEIGHT_MAX))
                return error_set(err, ERR_FORMAT,
                                 "a number of at most %g is expected at 'weights.%d.%d'",
                                 WEIGHT_MAX, a, j);
            r->weights[(size_t)a * ROUTER_WEIGHTS + (size_t)j] = x;
        }
    return OK;
}

static int document_read(struct router *r, const json_t *root, struct error *err) {
    static const char *const keys[] = {"format", "agents", "l2", "fit", "weights"};
    const char *key;
    json_t *v;
    if (!json_is_object(root) || strcmp(json_get_string(root, "format"), FORMAT) != 0)
        return error_set(err, ERR_FORMAT, "the 'format' is not '%s'; fit the team again", FORMAT);
    json_object_foreach ((json_t *)(uintptr_t)root, key, v) {
        size_t k = 0;
        while (k < ARRAY_LEN(keys) && strcmp(keys[k], key) != 0) k++;
        if (k == ARRAY_LEN(keys)) return error_set(err, ERR_FORMAT, "unknown key '%s'", key);
    }
    r->l2 = json_get_number(root, "l2");
    if (!(r->l2 > 0) || !isfinite(r->l2))
        return error_set(err, ERR_FORMAT, "a positive number is expected in 'l2'");
    int rc = agents_read(r, json_object_get(root, "agents"), err);
    return rc == OK ? weights_read(r, json_object_get(root, "weights"), err) : rc;
}

struct router *router_parse(const char *text, size_t len, const char *path, struct error *err) {
    if (len > ROUTER_MAX_BYTES) {
        error_set(err, ERR_FORMAT, "router '%s' has more than %d bytes", path, ROUTER_MAX_BYTES);
        return NULL;
    }
    json_t *root = json_parse(text, len, path, err);
    if (!root) return NULL;
    struct router *r = xcalloc(1, sizeof *r);
    sha256_bytes(text, len, r->hash);
    int rc = document_read(r, root, err);
    json_decref(root);
    if (rc == OK) return r;
    error_wrap(err, "router '%s'", path);
    router_free(r);
    return NULL;
}

struct router *router_read(const char *path, struct error *err) {
    struct buf text = {0};
    struct router *r = NULL;
    if (file_read(path, ROUTER_MAX_BYTES, &text, err) == OK)
        r = router_parse(text.data ? text.data : "", text.len, path, err);
    buf_release(&text);
    return r;
}

json_t *router_json(const struct router *r, const json_t *fit) {
    json_t *agents = json_array(), *weights = json_array();
    for (int a = 0; a < r->n_agents; a++) {
        json_t *row = json_array();
        for (int j = 0; j < ROUTER_WEIGHTS; j++)
            json_array_append_new(row,
                                  json_real(r->weights[(size_t)a * ROUTER_WEIGHTS + (size_t)j]));
        json_array_append_new(agents, json_string(r->names[a]));
        json_array_append_new(weights, row);
    }
    return json_pack("{s:s,s:o,s:f,s:o,s:o}", "format", FORMAT, "agents", agents, "l2", r->l2,
                     "fit", fit ? json_deep_copy(fit) : json_null(), "weights", weights);
}

void router_free(struct router *r) {
    if (!r) return;
    for (int a = 0; a < r->n_agents; a++) free(r->names[a]);
    free(r->weights);
    free(r);
}
