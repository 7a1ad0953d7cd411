/*
 * preference_data: the data of training on preferences and rewards: pairs of answers, and prompts
 * without an answer.
 *
 * The prompt, which includes earlier turns of the assistant, is never a target. The formats are
 * those of TRL. Errors name file, line and field.
 */
#define _GNU_SOURCE
#include "data/internal.h"
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

#define FRY_DEFAULT_PROMPTS 2000

struct pair_load_state {
    struct dataset *d;
    const struct tokenizer *tok;
    const char *path;
    int32_t max_length;
    int cap;
};
struct encoded_text { /* one side of a pair (chosen or rejected), or a prompt */
    struct token_ids ids;
    struct buf mask;
    struct sample_digest digest;
};
struct message_list { /* messages; the first n_prompt are the prompt */
    struct chat_message *v;
    int n, n_prompt;
};

static int field_error(const char *path, int line, const char *field, const char *what,
                       struct error *err) {
    return error_set(err, ERR_FORMAT, "'%s' line %d: '%s' %s", path, line, field, what);
}

static void encoded_text_release(struct encoded_text *t) {
    token_ids_release(&t->ids);
    buf_release(&t->mask);
}

/* Makes room for two more samples and their digests. *cap: capacity of both arrays. */
static int dataset_reserve(struct dataset *d, int *cap, struct error *err) {
    if (d->n_read + 2 <= *cap) return OK;
    int new_cap = *cap ? 2 * *cap : 64;
    struct train_sample *v = try_realloc(d->v, (size_t)new_cap * sizeof *v, err);
    if (!v) return err->code;
    d->v = v;
    struct sample_digest *digests = try_realloc(d->digests, (size_t)new_cap * sizeof *digests, err);
    if (!digests) return err->code;
    d->digests = digests;
    *cap = new_cap;
    return OK;
}

static int64_t count_targets(const struct train_sample *s) {
    int64_t n = 0;
    for (int32_t i = 1; i < s->n; i++) n += s->mask[i];
    return n;
}

/* Adds a pair and takes over its arrays. If a cut leaves one side without a target, the pair is
 * only counted, and the caller keeps the arrays. */
static int pair_add(struct pair_load_state *l, struct encoded_text side[2], int line,
                    struct error *err) {
    struct dataset *d = l->d;
    struct train_sample s[2];
    bool cut = false, both_have_targets = true;
    int rc = dataset_reserve(d, &l->cap, err);
    if (rc) return rc;
    for (int k = 0; k < 2; k++) {
        s[k] = (struct train_sample){side[k].ids.v, (uint8_t *)side[k].mask.data, side[k].ids.n, 0};
        if (!count_targets(&s[k]))
            return field_error(l->path, line, k ? "rejected" : "chosen", "is empty", err);
        side[k].digest.tokens = s[k].n;
        side[k].digest.line = line;
        if (l->max_length > 0 && s[k].n > l->max_length) s[k].n = l->max_length, cut = true;
        both_have_targets = both_have_targets && count_targets(&s[k]) > 0;
    }
    for (int k = 0; k < 2; k++) {
        d->digests[d->n_read++] = side[k].digest;
        if (!both_have_targets) continue;
        d->v[d->n++] = s[k];
        d->tokens += s[k].n;
        d->targets += count_targets(&s[k]);
        side[k].ids = (struct token_ids){0};
        side[k].mask = (struct buf){0};
    }
    d->cut += 2 * cut;
    d->dropped += 2 * !both_have_targets;
    return OK;
}

/* Encodes prompt and answer as one text, followed by the end-of-text token. */
static void text_encode(const struct tokenizer *tok, const char *prompt, const char *answer,
                        struct token_ids *out) {
    struct buf text = {0};
    buf_puts(&text, prompt);
    buf_puts(&text, answer);
    tokenizer_encode(tok, text.data, text.len, TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, out);
    if (tokenizer_eos(tok) >= 0) token_ids_add(out, tokenizer_eos(tok));
    buf_release(&text);
}

/* Appends the mask of t: the tokens from index `first` on are targets. */
static void mask_completion(struct encoded_text *t, int first) {
    for (int i = 0; i < t->ids.n; i++) buf_add(&t->mask, i >= first ? "\1" : "\0", 1);
}

static int common_prefix_len(const struct token_ids *a, const struct token_ids *b) {
    int i = 0;
    while (i < a->n && i < b->n && a->v[i] == b->v[i]) i++;
    return i;
}

/* Encodes both sides of a pair of texts. The tokens that are equal to those of the prompt alone,
 * from the beginning on, are not targets. If `prompt` is NULL, the tokens that are equal in both
 * sides, from the beginning on, are not targets. */
static int preference_texts_encode(struct pair_load_state *l, const char *prompt,
                                   const char *const answers[2], struct encoded_text side[2],
                                   struct error *err) {
    struct token_ids prompt_ids = {0};
    int rc = OK;
    if (prompt)
        tokenizer_encode(l->tok, prompt, strlen(prompt),
                         TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, &prompt_ids);
    for (int k = 0; k < 2; k++) text_encode(l->tok, prompt ? prompt : "", answers[k], &side[k].ids);
    for (int k = 0; !rc && k < 2; k++) {
        struct chat_message messages[2] = {{"user", prompt ? prompt : ""},
                                           {"assistant", answers[k]}};
        mask_completion(&side[k],
                        common_prefix_len(&side[k].ids, prompt ? &prompt_ids : &side[1 - k].ids));
        rc = sample_digest_compute(messages, 2, &side[k].digest, err);
    }
    token_ids_release(&prompt_ids);
    return rc;
}

static int count_assistant_turns(const struct chat_message *v, int n) {
    int count = 0;
    for (int i = 0; i < n; i++) count += strcmp(v[i].role, "assistant") == 0;
    return count;
}

/* Clears the first `turns` runs of ones in the mask, which are the assistant's turns in the
 * prompt. */
static void mask_prompt_turns(struct buf *mask, int turns) {
    size_t i = 0;
    for (; turns > 0 && i < mask->len; turns--) {
        while (i < mask->len && !mask->data[i]) i++;
        while (i < mask->len && mask->data[i]) mask->data[i++] = 0;
    }
}

static int message_list_encode(struct pair_load_state *l, const struct message_list *t,
                               struct encoded_text *out, int line, struct error *err) {
    int rc = sample_digest_compute(t->v, t->n, &out->digest, err);
    if (!rc) rc = chat_encode(l->tok, t->v, t->n, false, &out->ids, &out->mask, err);
    if (rc) return error_wrap(err, "'%s' line %d", l->path, line);
    mask_prompt_turns(&out->mask, count_assistant_turns(t->v, t->n_prompt));
    return OK;
}

/* Appends the messages of `value`, or its text as one message of `role`, to t->v, which is
 * malloc'ed. */
static int message_list_append(const struct pair_load_state *l, const json_t *value,
                               const char *field, const char *role, int line,
                               struct message_list *t, struct error *err) {
    struct chat_message *more, one = {role, json_string_value(value)};
    int n = 1, rc = OK;
    if (!json_is_string(value))
        rc = conversation_parse(l->path, line, field, value, &more, &n, err);
    if (rc) return rc;
    t->v = xrealloc(t->v, (size_t)(t->n + n + 1) * sizeof *t->v);
    memcpy(t->v + t->n, json_is_string(value) ? &one : more, (size_t)n * sizeof *t->v);
    t->n += n;
    if (!json_is_string(value)) free(more);
    return OK;
}

static bool messages_equal(const struct chat_message *a, const struct chat_message *b) {
    return !strcmp(a->role, b->role) && !strcmp(a->content, b->content);
}

/* Encodes both sides of a pair of message lists. If there is no prompt, or if `chosen` does not
 * begin with the assistant, the sides are whole conversations, and their common prefix is the
 * prompt. */
static int preference_messages_encode(struct pair_load_state *l, const json_t *value,
                                      const json_t *prompt, struct encoded_text side[2], int line,
                                      struct error *err) {
    static const char *const names[2] = {"chosen", "rejected"};
    struct message_list t[2] = {{0}};
    const json_t *first = json_array_get(json_object_get(value, "chosen"), 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    bool is_whole_conversation = !prompt || (role && strcmp(role, "assistant") != 0);
    int rc = OK;
    for (int k = 0; !rc && k < 2; k++) {
        if (!is_whole_conversation)
            rc = message_list_append(l, prompt, "prompt", "user", line, &t[k], err);
        t[k].n_prompt = t[k].n;
        if (!rc)
            rc = message_list_append(l, json_object_get(value, names[k]), names[k], "assistant",
                                     line, &t[k], err);
    }
    if (!rc && is_whole_conversation) {
        int n = 0;
        while (n < t[0].n && n < t[1].n && messages_equal(&t[0].v[n], &t[1].v[n])) n++;
        t[0].n_prompt = t[1].n_prompt = n;
    }
    for (int k = 0; !rc && k < 2; k++) {
        if (count_assistant_turns(t[k].v + t[k].n_prompt, t[k].n - t[k].n_prompt) == 0)
            rc = field_error(l->path, line, names[k],
                             "has no assistant turn after the shared prompt", err);
        if (!rc) rc = message_list_encode(l, &t[k], &side[k], line, err);
    }
    for (int k = 0; k < 2; k++) free(t[k].v);
    return rc;
}

static int pair_parse(void *ctx, const json_t *value, int line, struct error *err) {
    struct pair_load_state *l = ctx;
    const json_t *prompt = json_object_get(value, "prompt"),
                 *answers[2] = {json_object_get(value, "chosen"),
                                json_object_get(value, "rejected")};
    struct encoded_text side[2] = {{.digest = {.line = line}}, {.digest = {.line = line}}};
    int rc = OK;
    if (!json_is_object(value))
        return error_set(err, ERR_FORMAT, "'%s' line %d: a pair must be an object", l->path, line);
    for (int k = 0; k < 2; k++)
        if (!json_is_string(answers[k]) && !json_is_array(answers[k]))
            return field_error(l->path, line, k ? "rejected" : "chosen",
                               answers[k] ? "must be a text or a list of messages" : "is missing",
                               err);
    if (json_is_string(answers[0]) != json_is_string(answers[1]))
        return field_error(l->path, line, "rejected", "must have the form of 'chosen'", err);
    if (prompt && !json_is_string(prompt) && !json_is_array(prompt))
        return field_error(l->path, line, "prompt", "must be a text or a list of messages", err);
    const char *texts[2] = {json_string_value(answers[0]), json_string_value(answers[1])};
    if (texts[0] && !json_is_array(prompt))
        rc = preference_texts_encode(l, json_string_value(prompt), texts, side, err);
    else
        rc = preference_messages_encode(l, value, prompt, side, line, err);
    if (!rc) rc = pair_add(l, side, line, err);
    for (int k = 0; k < 2; k++) encoded_text_release(&side[k]);
    return rc;
}

int dataset_load_preferences(struct dataset *d, const char *path, const struct tokenizer *tok,
                             int32_t max_length, struct error *err) {
    struct pair_load_state l = {.d = d, .tok = tok, .path = path, .max_length = max_length};
    *d = (struct dataset){0};
    int rc = sha256_file(path, d->hash, err);
    if (!rc) rc = json_file_each(path, pair_parse, &l, err);
    if (!rc && !d->n) rc = error_set(err, ERR_FORMAT, "'%s' holds no pair to learn from", path);
    if (rc) dataset_release(d);
    return rc;
}

/* prompts */

struct prompt_load_state {
    struct prompt_set *p;
    const struct prompt_source *s;
    int cap;
};

/* Encodes the prompt in `field`, a text or messages, up to the beginning of the answer. */
static int prompt_encode(const struct prompt_load_state *l, const json_t *value, const char *field,
                         struct encoded_text *out, int line, struct error *err) {
    const json_t *content = json_object_get(value, field);
    const struct prompt_source *s = l->s;
    struct chat_message *msgs, text[2] = {{"user", json_string_value(content)}, {"assistant", ""}};
    int n = 1;
    if (text[0].content) {
        tokenizer_encode(s->tok, text[0].content, strlen(text[0].content),
                         TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, &out->ids);
        return sample_digest_compute(text, 2, &out->digest, err);
    }
    int rc = conversation_parse(s->path, line, field, content, &msgs, &n, err);
    if (rc) return rc;
    if (!n || !strcmp(msgs[n - 1].role, "assistant"))
        rc = field_error(s->path, line, field,
                         n ? "ends with the assistant's turn, which is to be written" : "is empty",
                         err);
    if (!rc) rc = chat_encode(s->tok, msgs, n, true, &out->ids, NULL, err);
    msgs[n] = text[1]; // conversation_parse leaves room for one more message
    if (!rc) rc = sample_digest_compute(msgs, n + 1, &out->digest, err);
    free(msgs);
    return rc;
}

static int prompt_add(struct prompt_load_state *l, const json_t *item, struct encoded_text *t,
                      struct error *err) {
    struct dataset *d = &l->p->data;
    int cap = l->cap, rc = dataset_reserve(d, &l->cap, err);
    if (!rc && l->cap != cap) {
        json_t **items = try_realloc(l->p->items, (size_t)l->cap * sizeof *items, err);
        if (!items) return err->code;
        l->p->items = items;
    }
    if (rc) return rc;
    if (t->ids.n == 0) return field_error(l->s->path, t->digest.line, "prompt", "is empty", err);
    t->digest.tokens = t->ids.n;
    d->digests[d->n_read++] = t->digest;
    if (t->ids.n > l->s->max_length) {
        d->cut++;
        d->dropped++;
        return OK;
    }
    l->p->items[d->n] = json_deep_copy(item);
    d->v[d->n++] = (struct train_sample){.tokens = t->ids.v, .n = t->ids.n};
    d->tokens += t->ids.n;
    t->ids = (struct token_ids){0};
    return OK;
}

static int prompt_parse(void *ctx, const json_t *value, int line, struct error *err) {
    struct prompt_load_state *l = ctx;
    const struct prompt_source *s = l->s;
    bool messages = json_object_get(value, "messages"), prompt = json_object_get(value, "prompt");
    struct encoded_text t = {.digest = {.line = line}};
    if (!json_is_object(value) || messages == prompt)
        return error_set(err, ERR_FORMAT, "'%s' line %d: expected an object with '%s'", s->path,
                         line, messages ? "only one of messages and prompt" : "messages or prompt");
    int rc = s->check ? s->check(s->check_ctx, value, err) : OK;
    if (rc) return error_wrap(err, "'%s' line %d", s->path, line);
    rc = prompt_encode(l, value, messages ? "messages" : "prompt", &t, line, err);
    if (!rc && s->prefix) tokenizer_encode(s->tok, s->prefix, strlen(s->prefix), 0, &t.ids);
    if (!rc) rc = prompt_add(l, value, &t, err);
    encoded_text_release(&t);
    return rc;
}

/* Generates the prompts of "fry:FAMILY[:N]". */
static int fry_prompts_generate(struct prompt_load_state *l, struct error *err) {
    char name[32] = "", *end = NULL;
    const char *family_name = l->s->path + 4, *colon = strchrnul(family_name, ':');
    long n = *colon ? strtol(colon + 1, &end, 10) : FRY_DEFAULT_PROMPTS;
    snprintf(name, sizeof name, "%.*s", (int)(colon - family_name), family_name);
    int family = family_find(name), rc = OK;
    if (family < 0 || n < 1 || n > 10000000 || (end && *end))
        return error_set(err, ERR_USAGE, "'%s': it is written fry:FAMILY or fry:FAMILY:N",
                         l->s->path);
    if (family_check_questions(family, err) != OK) return err->code;
    char *key = xasprintf("%s %ld %llu", name, n, (unsigned long long)l->s->seed);
    sha256_bytes(key, strlen(key), l->p->data.hash);
    free(key);
    for (long i = 0; !rc && i < n; i++) {
        struct task_item it;
        family_item(family, SPLIT_TRAIN, l->s->seed, (uint32_t)i, false, &it);
        json_t *v = json_pack("{s:[{s:s,s:s}],s:s}", "messages", "role", "user", "content",
                              it.question, "answer", it.choices[it.correct]);
        rc = prompt_parse(l, v, (int)i + 1, err);
        json_decref(v);
        task_item_release(&it);
    }
    return rc;
}

int prompt_set_load(struct prompt_set *p, const struct prompt_source *s, struct error *err) {
    struct prompt_load_state l = {.p = p, .s = s};
    *p = (struct prompt_set){0};
    int rc = strncmp(s->path, "fry:", 4) == 0 ? fry_prompts_generate(&l, err)
                                              : sha256_file(s->path, p->data.hash, err);
    if (!rc && !p->data.n_read) rc = json_file_each(s->path, prompt_parse, &l, err);
    if (!rc && !p->data.n)
        rc = error_set(err, ERR_FORMAT, "'%s' holds no prompt%s", s->path,
                       p->data.dropped ? " that leaves room for an answer" : "");
    if (rc) prompt_set_release(p);
    return rc;
}

void prompt_set_release(struct prompt_set *p) {
    for (int i = 0; i < p->data.n; i++) json_decref(p->items[i]);
    free(p->items);
    dataset_release(&p->data);
    *p = (struct prompt_set){0};
}
