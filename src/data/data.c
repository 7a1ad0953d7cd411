/*
 * data: reads training files to token samples with a mask of targets.
 *
 * A file has JSON objects, one per line, pretty-printed one after another, or in one array. Each
 * object is {messages}, perhaps with {tools}, {prompt, completion} or {text}, or is converted to
 * one of these (forms.c). The targets are the
 * assistant's turns with their ends; the completion and the end-of-text token; or all of the text.
 * Other fields (ids, sources) are ignored.
 *
 * This file does not shuffle, split or weight samples. It computes the digests by which lint.c
 * checks samples. Invariant: every kept sample has at least one target that follows another token.
 */
#define _GNU_SOURCE
#include "data/internal.h"

#include <stdlib.h>
#include <string.h>

#define MAX_MESSAGES 4096

struct dataset_load_state {
    struct dataset *d;
    const struct tokenizer *tok;
    const char *path, *form; /* form: NULL: by the keys of each sample */
    int32_t max_length;
    int cap, digests_cap; /* capacities of d->v and d->digests */
};

static int field_error(const struct dataset_load_state *l, int line, struct error *err,
                       const char *field, const char *what) {
    return error_set(err, ERR_FORMAT, "'%s' line %d: '%s' %s", l->path, line, field, what);
}

/* Returns v, reallocated if needed, with room for one item after the first n. NULL: no memory; v is
 * unchanged. */
static void *array_grow(void *v, int n, int *cap, size_t size, struct error *err) {
    if (n < *cap) return v;
    int new_cap = *cap ? 2 * *cap : 64;
    v = try_realloc(v, (size_t)new_cap * size, err);
    if (v) *cap = new_cap;
    return v;
}

/* Makes room for one more sample and its digest. */
static int dataset_reserve(struct dataset_load_state *l, struct error *err) {
    struct dataset *d = l->d;
    struct train_sample *v = array_grow(d->v, d->n, &l->cap, sizeof *v, err);
    if (!v) return err->code;
    d->v = v;
    struct sample_digest *digests =
        array_grow(d->digests, d->n_read, &l->digests_cap, sizeof *digests, err);
    if (!digests) return err->code;
    d->digests = digests;
    return OK;
}

/* Adds a sample. Takes ownership of ids and mask. If the cut leaves no target, the sample is only
 * counted. */
static int sample_add(struct dataset_load_state *l, struct token_ids *ids, struct buf *mask,
                      struct sample_digest *digest, struct error *err) {
    struct dataset *d = l->d;
    struct train_sample s = {.tokens = ids->v, .mask = (uint8_t *)mask->data, .n = ids->n};
    int64_t targets = 0;
    bool cut = l->max_length > 0 && s.n > l->max_length;
    digest->tokens = s.n;
    if (cut) s.n = l->max_length;
    for (int32_t i = 1; i < s.n; i++) targets += s.mask[i];
    int rc = dataset_reserve(l, err);
    if (!rc && !targets && !cut)
        rc = error_set(err, ERR_FORMAT, "'%s' line %d: the sample is empty", l->path, digest->line);
    if (rc || !targets) train_sample_release(&s);
    if (rc) return rc;
    d->digests[d->n_read++] = *digest;
    d->cut += cut;
    d->dropped += !targets;
    if (!targets) return OK;
    d->v[d->n++] = s;
    d->tokens += s.n;
    d->targets += targets;
    return OK;
}

static bool role_is_valid(const char *role) {
    return !strcmp(role, "system") || !strcmp(role, "user") || !strcmp(role, "assistant");
}

struct data_location { /* position in a file, for errors in a list of messages */
    const char *path, *field;
    int line;
};

static int location_error(const struct data_location *p, struct error *err, const char *subfield,
                          const char *what) {
    return error_set(err, ERR_FORMAT, "'%s' line %d: '%s%s' %s", p->path, p->line, p->field,
                     subfield, what);
}

static int message_parse(const struct data_location *p, const json_t *value, int i,
                         struct chat_message *out, struct error *err) {
    char subfield[64];
    const char *names[2] = {"role", "content"};
    const char *texts[2];
    snprintf(subfield, sizeof subfield, "[%d]", i);
    if (!json_is_object(value)) return location_error(p, err, subfield, "must be an object");
    for (int k = 0; k < 2; k++) {
        const json_t *text = json_object_get(value, names[k]);
        snprintf(subfield, sizeof subfield, "[%d].%s", i, names[k]);
        if (!text) return location_error(p, err, subfield, "is missing");
        if (!json_is_string(text)) return location_error(p, err, subfield, "must be a string");
        texts[k] = json_string_value(text);
    }
    *out = (struct chat_message){.role = texts[0], .content = texts[1]};
    snprintf(subfield, sizeof subfield, "[%d].role", i);
    if (!role_is_valid(out->role))
        return location_error(p, err, subfield, "must be system, user or assistant");
    return OK;
}

int conversation_parse(const char *path, int line, const char *field, const json_t *list,
                       struct chat_message **out, int *n, struct error *err) {
    const struct data_location p = {path, field, line};
    size_t size = json_array_size(list);
    int rc = OK;
    if (!json_is_array(list)) return location_error(&p, err, "", "must be a list");
    if (size > MAX_MESSAGES) return location_error(&p, err, "", "has more than 4096 entries");
    *out = xcalloc(size + 1, sizeof **out);
    for (*n = 0; !rc && (size_t)*n < size; ++*n)
        rc = message_parse(&p, json_array_get(list, (size_t)*n), *n, *out + *n, err);
    if (rc) free(*out);
    return rc;
}

/* Clears the mask of assistant turns with "weight": 0. Each assistant turn is a run of ones in the
 * mask; if the chat template joins turns, weights are an error. */
static int turn_weights_apply(const struct dataset_load_state *l, const json_t *list,
                              struct buf *mask, int line, struct error *err) {
    size_t turns = 0, runs = 0, i;
    bool ignored[MAX_MESSAGES], any = false;
    const json_t *v;
    json_array_foreach ((json_t *)(uintptr_t)list, i, v) {
        const json_t *weight = json_object_get(v, "weight");
        if (strcmp(json_string_value(json_object_get(v, "role")), "assistant") != 0) continue;
        if (weight && (!json_is_integer(weight) || json_integer_value(weight) >> 1 != 0))
            return field_error(l, line, err, "weight", "must be 0 or 1");
        ignored[turns] = weight && json_integer_value(weight) == 0;
        any |= ignored[turns++];
    }
    if (!any) return OK;
    for (i = 0; i < mask->len; i++) runs += mask->data[i] && (i == 0 || !mask->data[i - 1]);
    if (runs != turns)
        return field_error(l, line, err, "weight",
                           "cannot be followed: the chat template joins turns");
    for (i = 0, runs = 0; i < mask->len; i++) {
        bool run_begins = mask->data[i] && (i == 0 || !mask->data[i - 1]);
        runs += run_begins;
        if (mask->data[i] && ignored[runs - 1]) mask->data[i] = 2; // nonzero: keeps the run whole
    }
    for (i = 0; i < mask->len; i++) mask->data[i] = mask->data[i] == 1;
    return OK;
}

/* conversations with tools, calls or reasoning, as in chat requests: for the template as they are
 */

static bool has_more_than_text(const json_t *list, const json_t *tools) {
    size_t i;
    const json_t *m;
    json_array_foreach ((json_t *)(uintptr_t)list, i, m) {
        const char *role = json_get_string(m, "role");
        if (json_object_get(m, "tool_calls") || json_object_get(m, "reasoning_content") ||
            strcmp(role, "tool") == 0)
            return true;
    }
    return tools != NULL;
}

/* Whether the text has a message's reasoning, which the template may trim. */
static bool has_reasoning(const json_t *message, const char *text) {
    const char *reasoning = json_get_string(message, "reasoning_content");
    reasoning += strspn(reasoning, " \n");
    size_t n = strlen(reasoning);
    while (n > 0 && strchr(" \n", reasoning[n - 1])) n--;
    return memmem(text, strlen(text), reasoning, n) != NULL;
}

/* Whether the text names every function of a message's calls. */
static bool names_calls(const json_t *message, const char *text) {
    size_t i;
    const json_t *call;
    json_array_foreach (json_object_get(message, "tool_calls"), i, call) {
        const char *name = json_get_string(json_object_get(call, "function"), "name");
        if (!*name || !strstr(text, name)) return false;
    }
    return true;
}

/* Refuses a template that drops tools, calls or reasoning. Templates leave out the reasoning before
 * the user's last message on purpose. */
static int rendered_check(const struct dataset_load_state *l, const json_t *list,
                          const json_t *tools, const struct token_ids *ids, int line,
                          struct error *err) {
    struct buf text = {0};
    size_t i, last_user = 0;
    const json_t *v;
    bool complete = true;
    json_array_foreach ((json_t *)(uintptr_t)list, i, v)
        if (strcmp(json_get_string(v, "role"), "user") == 0) last_user = i;
    tokenizer_decode(l->tok, ids->v, ids->n, true, &text);
    buf_puts(&text, "");
    json_array_foreach ((json_t *)(uintptr_t)list, i, v)
        complete &= names_calls(v, text.data) && (i < last_user || has_reasoning(v, text.data));
    json_array_foreach ((json_t *)(uintptr_t)tools, i, v) {
        const char *name = json_get_string(json_object_get(v, "function"), "name");
        complete &= *name && strstr(text.data, name);
    }
    buf_release(&text);
    return complete ? OK
                    : field_error(l, line, err, "messages",
                                  "have tools, calls or reasoning that the model's chat template "
                                  "does not write");
}

/* A copy of the messages in which each content is a text: that of a call may be null or missing. */
static int full_messages_parse(const struct dataset_load_state *l, const json_t *list, int line,
                               json_t **out, struct error *err) {
    size_t i;
    json_t *m;
    *out = json_deep_copy(list);
    json_array_foreach (*out, i, m) {
        const char *role = json_get_string(m, "role");
        const json_t *content = json_object_get(m, "content");
        if (!role_is_valid(role) && strcmp(role, "tool") != 0)
            return field_error(l, line, err, "messages",
                               "have roles system, user, assistant and tool");
        if (json_object_get(m, "tool_calls") && (!content || json_is_null(content)))
            json_object_set_new(m, "content", json_string(""));
        else if (!json_is_string(content))
            return field_error(l, line, err, "messages", "need contents that are strings");
    }
    return OK;
}

static int full_sample_parse(struct dataset_load_state *l, const json_t *list, const json_t *tools,
                             int line, struct error *err) {
    struct token_ids ids = {0};
    struct buf mask = {0};
    struct sample_digest digest = {.line = line};
    json_t *messages = NULL;
    if (tools && !json_is_array(tools)) return field_error(l, line, err, "tools", "must be a list");
    int rc = full_messages_parse(l, list, line, &messages, err);
    const struct chat_template_input in = {.messages = messages, .tools = tools};
    if (!rc && (rc = chat_template_encode(l->tok, &in, &ids, &mask, err)))
        error_wrap(err, "'%s' line %d", l->path, line);
    if (!rc) rc = rendered_check(l, list, tools, &ids, line, err);
    if (!rc) rc = turn_weights_apply(l, list, &mask, line, err);
    if (!rc) {
        char *text = json_dumps(list, JSON_COMPACT | JSON_SORT_KEYS);
        const struct chat_message whole = {.role = "assistant", .content = text};
        rc = sample_digest_compute(&whole, 1, &digest, err);
        free(text);
    }
    json_decref(messages);
    if (!rc) return sample_add(l, &ids, &mask, &digest, err);
    token_ids_release(&ids);
    buf_release(&mask);
    return rc;
}

static int messages_parse(struct dataset_load_state *l, const json_t *list, const json_t *tools,
                          int line, struct error *err) {
    struct chat_message *msgs;
    int n;
    bool has_answer = false;
    if (has_more_than_text(list, tools)) return full_sample_parse(l, list, tools, line, err);
    int rc = conversation_parse(l->path, line, "messages", list, &msgs, &n, err);
    if (rc) return rc;
    for (int i = 0; i < n; i++) has_answer = has_answer || !strcmp(msgs[i].role, "assistant");
    if (!has_answer)
        rc = field_error(l, line, err, "messages", "has no turn of the assistant to learn from");
    if (!rc) {
        struct token_ids ids = {0};
        struct buf mask = {0};
        struct sample_digest digest = {.line = line};
        rc = sample_digest_compute(msgs, n, &digest, err);
        if (!rc) rc = chat_encode(l->tok, msgs, n, false, &ids, &mask, err);
        if (rc)
            error_wrap(err, "'%s' line %d", l->path, line);
        else
            rc = turn_weights_apply(l, list, &mask, line, err);
        if (!rc) {
            rc = sample_add(l, &ids, &mask, &digest, err);
        } else {
            token_ids_release(&ids);
            buf_release(&mask);
        }
    }
    free(msgs);
    return rc;
}

/* Adds a sample of prompt and completion, encoded as one text. The tokens that are equal to those
 * of the prompt alone, from the beginning on, are not targets. So a token that spans the end of the
 * prompt is a target. `prompt` may be NULL. The end-of-text token is a target too, so that the
 * model learns to stop. */
static int prompt_completion_encode(struct dataset_load_state *l, const json_t *prompt,
                                    const json_t *completion, int line, struct error *err) {
    struct token_ids ids = {0}, prompt_ids = {0};
    struct buf text = {0}, mask = {0};
    struct sample_digest digest = {.line = line};
    struct chat_message messages[2] = {
        {.role = "user", .content = json_string_value(prompt)},
        {.role = "assistant", .content = json_string_value(completion)}};
    int rc = sample_digest_compute(prompt ? messages : messages + 1, prompt ? 2 : 1, &digest, err);
    if (rc) return rc;
    if (prompt) {
        buf_add(&text, json_string_value(prompt), json_string_length(prompt));
        tokenizer_encode(l->tok, text.data, text.len, TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL,
                         &prompt_ids);
    }
    buf_add(&text, json_string_value(completion), json_string_length(completion));
    tokenizer_encode(l->tok, text.data, text.len, TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL,
                     &ids);
    if (tokenizer_eos(l->tok) >= 0) token_ids_add(&ids, tokenizer_eos(l->tok));
    for (bool is_target = false; mask.len < (size_t)ids.n;) {
        int i = (int)mask.len;
        is_target = is_target || i >= prompt_ids.n || ids.v[i] != prompt_ids.v[i];
        buf_add(&mask, is_target ? "\1" : "\0", 1);
    }
    token_ids_release(&prompt_ids);
    buf_release(&text);
    return sample_add(l, &ids, &mask, &digest, err);
}

static int text_field_check(const struct dataset_load_state *l, const json_t *value,
                            const char *field, int line, struct error *err) {
    const json_t *text = json_object_get(value, field);
    if (!text) return field_error(l, line, err, field, "is missing");
    if (!json_is_string(text)) return field_error(l, line, err, field, "must be a string");
    return OK;
}

/* Reads a sample after its conversion. */
static int converted_parse(struct dataset_load_state *l, const json_t *value, int line,
                           struct error *err) {
    const json_t *messages = json_object_get(value, "messages"),
                 *text = json_object_get(value, "text");
    const json_t *prompt = json_object_get(value, "prompt"),
                 *completion = json_object_get(value, "completion");
    if (messages) return messages_parse(l, messages, json_object_get(value, "tools"), line, err);
    if (!completion) {
        int rc = text_field_check(l, value, "text", line, err);
        return rc ? rc : prompt_completion_encode(l, NULL, text, line, err);
    }
    int rc = text_field_check(l, value, "prompt", line, err);
    if (!rc) rc = text_field_check(l, value, "completion", line, err);
    return rc ? rc : prompt_completion_encode(l, prompt, completion, line, err);
}

static int sample_parse(void *ctx, const json_t *value, int line, struct error *err) {
    struct dataset_load_state *l = ctx;
    struct dataset *d = l->d;
    const char *form = NULL;
    json_t *sample;
    int rc = sample_convert(value, l->form, &sample, &form, err);
    if (rc)
        error_wrap(err, "'%s' line %d", l->path, line);
    else
        rc = converted_parse(l, sample, line, err);
    if (!rc) d->form = !d->form || d->form == form ? form : "several";
    json_decref(sample);
    return rc;
}

int dataset_load(struct dataset *d, const char *path, const char *form, const struct tokenizer *tok,
                 int32_t max_length, struct error *err) {
    struct dataset_load_state l = {
        .d = d, .tok = tok, .path = path, .form = form, .max_length = max_length};
    *d = (struct dataset){0};
    int rc = form ? sample_form_check(form, err) : OK;
    if (!rc) rc = sha256_file(path, d->hash, err);
    if (!rc) rc = sample_file_each(path, sample_parse, &l, err);
    if (!rc && !d->n)
        rc = error_set(err, ERR_FORMAT, "'%s' holds no sample to learn from%s", path,
                       d->cut ? "; all were cut before their first target" : "");
    if (rc) dataset_release(d);
    return rc;
}

struct train_sample train_sample_copy(const struct train_sample *s) {
    struct train_sample copy = *s;
    copy.tokens = memcpy(xmalloc((size_t)s->n * sizeof *s->tokens), s->tokens,
                         (size_t)s->n * sizeof *s->tokens);
    copy.mask = memcpy(xmalloc((size_t)s->n), s->mask, (size_t)s->n);
    return copy;
}

int32_t train_sample_activation(const struct train_sample *s, const struct adapter_config *c) {
    int32_t n = s->n;
    if (c->n_invocation == 0) return 0;
    while (s->mask && n > 0 && !s->mask[n - 1]) n--;
    while (s->mask && n > 0 && s->mask[n - 1]) n--;
    return adapter_activation(c, s->tokens, n);
}

int dataset_activate(struct dataset *d, const struct adapter_config *c, struct error *err) {
    for (int i = 0; i < d->n && c->n_invocation > 0; i++) {
        struct train_sample *s = &d->v[i];
        int32_t activation = train_sample_activation(s, c);
        if (activation == ADAPTER_INACTIVE)
            return error_set(err, ERR_MISMATCH,
                             "sample %d does not have the adapter's invocation, %d tokens from "
                             "token %d on, in its prompt; add it there, or choose a text that "
                             "begins and ends with special tokens, which never merge with others",
                             i + 1, c->n_invocation, c->invocation[0]);
        // the target at position j is predicted at j - 1
        for (int32_t j = 1; s->mask && j <= activation; j++) {
            d->targets -= s->mask[j];
            s->mask[j] = 0;
        }
    }
    return OK;
}

void train_sample_release(struct train_sample *s) {
    free(s->tokens);
    free(s->mask);
    *s = (struct train_sample){0};
}

void dataset_release(struct dataset *d) {
    for (int i = 0; i < d->n; i++) train_sample_release(&d->v[i]);
    free(d->v);
    free(d->digests);
    *d = (struct dataset){0};
}
