/*
 * synth: reads prompts, generates answers and writes lines; synth_filter.c selects the answers.
 *
 * The seed of an answer is a function of --seed, the prompt's tokens and the answer's number. So a
 * prompt gets the same answers at any place in the file, and different prompts get independent
 * seeds. Calls that the store has already are not repeated: an interrupted run continues, and a
 * change of the filters needs no generation.
 */
#define _GNU_SOURCE
#include "data/data.h"
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct synth_options, field)
const struct option_row synth_option_rows[] = {
    {"template", OPT_STRING, AT(template), "{topic}", 0, 0, "TEXT",
     "prompt for a topic, which replaces {topic}"},
    {"system", OPT_STRING, AT(system), NULL, 0, 0, "TEXT", "system message of prompts without one"},
    {"samples", OPT_INT, AT(samples), "4", 1, SYNTH_MAX_SAMPLES, "K", "answers to each prompt"},
    {"max-tokens", OPT_INT, AT(max_tokens), "256", 1, 1e6, "N", "maximum tokens of an answer"},
    {"temperature", OPT_FLOAT, AT(temperature), "0.8", 0, 100, "X",
     "sampling temperature; 0: greedy"},
    {"top-k", OPT_INT, AT(top_k), "0", 0, 1e6, "K", "only the K most probable tokens; 0: all"},
    {"top-p", OPT_FLOAT, AT(top_p), "0.95", 0, 1, "P", "only the smallest set with probability P"},
    {"min-p", OPT_FLOAT, AT(min_p), "0", 0, 1, "P",
     "only those at least P times as probable as the best"},
    {"seed", OPT_INT, AT(seed), "0", 0, 9e15, "N", "seed of the sampling"},
    {"unfinished", OPT_BOOL, AT(unfinished), NULL, 0, 0, NULL,
     "keep answers that were cut at --max-tokens or repeat themselves"},
    {"min-chars", OPT_INT, AT(min_chars), "0", 0, 1e9, "N", "shorter answers are dropped"},
    {"max-chars", OPT_INT, AT(max_chars), "0", 0, 1e9, "N",
     "longer answers are dropped; 0: no limit"},
    {"language", OPT_STRING, AT(language), NULL, 0, 0, "NAME",
     "ja, zh, en or ko, detected by the scripts of the letters; languages in Latin script are not "
     "distinguished"},
    {"language-share", OPT_FLOAT, AT(language_share), "0.7", 0, 1, "X",
     "share of the letters that must be of its scripts"},
    {"require", OPT_LIST, AT(require), NULL, 0, 0, "REGEX", "each must be found in the answer"},
    {"forbid", OPT_LIST, AT(forbid), NULL, 0, 0, "REGEX", "none may be found in the answer"},
    {"json-schema", OPT_STRING, AT(json_schema), NULL, 0, 0, "FILE",
     "the answer is JSON of this schema, members in its order"},
    {"answer", OPT_STRING, AT(answer), ANSWER_PREFIX, 0, 0, "TEXT",
     "text before the final answer; agreement compares final answers"},
    {"min-agreement", OPT_FLOAT, AT(min_agreement), "0", 0, 1, "X",
     "share of a prompt's answers that must give the same one"},
    {"held-out", OPT_STRING, AT(held_out), NULL, 0, 0, "FILE",
     "evaluation samples: a sample that repeats one, or asks its question, is dropped"},
    {"min-perplexity", OPT_STRING, AT(min_perplexity), NULL, 0, 0, "X",
     "lower perplexities are dropped; 10%: the lowest tenth of the samples that reach this filter"},
    {"max-perplexity", OPT_STRING, AT(max_perplexity), NULL, 0, 0, "X",
     "higher perplexities are dropped; 90%: the highest tenth"},
    {"n", OPT_ALIAS, 0, "max-tokens"},
    {"temp", OPT_ALIAS, 0, "temperature"},
    {0},
};
#undef AT

/* prompts */

enum {
    MAX_MESSAGES = 4096,
    TEMPLATE_TOKENS = 256,    /* tokens that a chat template adds to a conversation, at most */
    TOPICS_LIMIT = 256 << 20, /* bytes of a file of topics */
};

struct prompt_reader {
    struct synth_prompts *p;
    const struct synth_options *o;
    const char *path;
};

/* Takes ownership of `messages`. */
static int prompt_add(const struct prompt_reader *rd, json_t *messages, int line,
                      struct error *err) {
    struct synth_prompts *p = rd->p;
    size_t len = TEMPLATE_TOKENS, i;
    json_t *v;
    json_array_foreach (messages, i, v) len += json_string_length(json_object_get(v, "content"));
    if ((p->n & (p->n - 1)) == 0) { // the array is full at powers of two
        struct synth_prompt *grown =
            try_realloc(p->v, sizeof *grown * (size_t)MAX(2 * p->n, 1), err);
        if (!grown) return json_decref(messages), err->code;
        p->v = grown;
    }
    p->v[p->n++] = (struct synth_prompt){.messages = messages, .line = line};
    p->longest = MAX(p->longest, len);
    return OK;
}

static json_t *message_json(const char *role, const json_t *content) {
    return json_pack("{s:s,s:O}", "role", role, "content", content);
}

/* A new list of messages. If `has_system` is false, it begins with the system message of the
 * options, if they have one. */
static json_t *messages_new(const struct synth_options *o, bool has_system) {
    json_t *list = json_array();
    json_t *system = o->system && !has_system ? json_string(o->system) : NULL;
    if (system) json_array_append_new(list, message_json("system", system));
    json_decref(system);
    return list;
}

static const char *role_of(const json_t *message) {
    const char *role = json_string_value(json_object_get(message, "role"));
    return role ? role : "";
}

static int line_error(const struct prompt_reader *rd, int line, struct error *err,
                      const char *what) {
    return error_set(err, ERR_FORMAT, "'%s' line %d: %s", rd->path, line, what);
}

static int messages_parse(const struct prompt_reader *rd, const json_t *list, int line,
                          struct error *err) {
    size_t n = json_array_size(list);
    if (n > 0 && strcmp(role_of(json_array_get(list, n - 1)), "assistant") == 0) n--;
    if (n == 0 || n > MAX_MESSAGES)
        return line_error(rd, line, err, "'messages' must be a list with something to answer");
    json_t *out = messages_new(rd->o, strcmp(role_of(json_array_get(list, 0)), "system") == 0);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i), *content = json_object_get(v, "content");
        const char *role = role_of(v);
        if (!json_is_string(content) || (strcmp(role, "system") != 0 && strcmp(role, "user") != 0 &&
                                         strcmp(role, "assistant") != 0)) {
            json_decref(out);
            return error_set(err, ERR_FORMAT,
                             "'%s' line %d: 'messages[%zu]' must have a role (system, user or "
                             "assistant) and a text as content",
                             rd->path, line, i);
        }
        json_array_append_new(out, message_json(role, content));
    }
    return prompt_add(rd, out, line, err);
}

static int prompt_parse(void *ctx, const json_t *v, int line, struct error *err) {
    const struct prompt_reader *rd = ctx;
    const json_t *messages = json_object_get(v, "messages"), *prompt = json_object_get(v, "prompt");
    if (!messages == !prompt)
        return line_error(rd, line, err, "expected {\"prompt\": …} or {\"messages\": …}");
    if (messages) return messages_parse(rd, messages, line, err);
    if (!json_is_string(prompt)) return line_error(rd, line, err, "'prompt' must be text");
    json_t *list = messages_new(rd->o, false);
    json_array_append_new(list, message_json("user", prompt));
    return prompt_add(rd, list, line, err);
}

static int system_check(const struct synth_options *o, struct error *err) {
    json_t *system = o->system ? json_string(o->system) : NULL;
    if (o->system && !system) return error_set(err, ERR_USAGE, "'--system' is not UTF-8");
    json_decref(system);
    return OK;
}

int synth_prompts_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                       struct error *err) {
    struct prompt_reader rd = {p, o, path};
    *p = (struct synth_prompts){0};
    int rc = system_check(o, err);
    if (rc == OK) rc = json_file_each(path, prompt_parse, &rd, err);
    if (rc == OK && p->n == 0) rc = error_set(err, ERR_FORMAT, "'%s' has no prompts", path);
    if (rc != OK) synth_prompts_release(p);
    return rc;
}

static int topic_add(const struct prompt_reader *rd, const char *topic, int line,
                     struct error *err) {
    const char *placeholder = strstr(rd->o->template, "{topic}");
    char *text = xasprintf("%.*s%s%s", (int)(placeholder - rd->o->template), rd->o->template, topic,
                           placeholder + strlen("{topic}"));
    json_t *content = json_string(text), *list = messages_new(rd->o, false);
    free(text);
    if (content) json_array_append_new(list, message_json("user", content));
    json_decref(content);
    if (content) return prompt_add(rd, list, line, err);
    json_decref(list);
    return line_error(rd, line, err, "the topic, or the template, is not UTF-8");
}

int synth_topics_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                      struct error *err) {
    struct prompt_reader rd = {p, o, path};
    struct buf text = {0};
    int line = 0;
    *p = (struct synth_prompts){0};
    if (!strstr(o->template, "{topic}"))
        return error_set(err, ERR_USAGE, "'--template' has no {topic} in it");
    int rc = system_check(o, err);
    if (rc == OK) rc = file_read(path, TOPICS_LIMIT, &text, err);
    if (rc == OK && text.data && strlen(text.data) != text.len)
        rc = error_set(err, ERR_FORMAT, "'%s' is not text: it has a zero byte", path);
    for (char *rest = text.data, *topic; rc == OK && (topic = strsep(&rest, "\n")) != NULL;) {
        line++;
        topic[strcspn(topic, "\r")] = 0;
        if (*topic) rc = topic_add(&rd, topic, line, err);
    }
    if (rc == OK && p->n == 0) rc = error_set(err, ERR_FORMAT, "'%s' has no topics", path);
    if (rc != OK) synth_prompts_release(p);
    buf_release(&text);
    return rc;
}

void synth_prompts_release(struct synth_prompts *p) {
    for (int i = 0; i < p->n; i++) {
        json_decref(p->v[i].messages);
        token_ids_release(&p->v[i].tokens);
    }
    free(p->v);
    *p = (struct synth_prompts){0};
}

struct chat_message *synth_messages(const struct synth_prompt *p, const char *answer, int *n) {
    size_t n_messages = json_array_size(p->messages);
    struct chat_message *msgs = xcalloc(n_messages + 1, sizeof *msgs);
    for (size_t i = 0; i < n_messages; i++) {
        const json_t *v = json_array_get(p->messages, i);
        msgs[i] =
            (struct chat_message){role_of(v), json_string_value(json_object_get(v, "content"))};
    }
    if (answer) msgs[n_messages++] = (struct chat_message){"assistant", answer};
    *n = (int)n_messages;
    return msgs;
}

/* generating answers */

enum {
    LOOP_TOKENS = 48, /* an answer ends if its last 48 tokens repeat a cycle four times */
    SEED_BITS = 52,   /* a double, and so every JSON parser, represents such a seed exactly */
};

int synth_tokenize_prompts(struct synth *s, struct error *err) {
    if (!s->model->tok)
        return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", s->model->path);
    int32_t longest = 0, max_seq_len = s->model->config.max_seq_len;
    for (int i = 0; i < s->prompts.n; i++) {
        struct synth_prompt *p = &s->prompts.v[i];
        int n;
        struct chat_message *msgs = synth_messages(p, NULL, &n);
        int rc = chat_encode(s->model->tok, msgs, n, true, &p->tokens, NULL, err);
        free(msgs);
        if (rc == OK && p->tokens.n >= max_seq_len)
            rc = error_set(err, ERR_MISMATCH, "%d tokens, and the model has room for %d",
                           p->tokens.n, max_seq_len);
        if (rc != OK) return error_wrap(err, "the prompt in line %d", p->line);
        longest = MAX(longest, p->tokens.n);
    }
    s->max_len = (int32_t)MIN(longest + s->o->max_tokens, max_seq_len);
    return OK;
}

/* The seed of a sample: a hash of the option `seed`, the answer's index and the prompt's tokens. */
static uint64_t sample_seed(const struct synth *s, const struct synth_sample *x) {
    const struct token_ids *t = &s->prompts.v[x->prompt].tokens;
    uint64_t parts[] = {(uint64_t)s->o->seed, (uint64_t)x->index,
                        hash_fnv1a(t->v, (size_t)t->n * sizeof *t->v)};
    return hash_fnv1a(parts, sizeof parts) & (((uint64_t)1 << SEED_BITS) - 1);
}

/* The request of a sample. Its fields are a part of the call's identity, so no field may depend on
 * the batch or the machine. */
static struct engine_request sample_request(const struct synth *s, struct synth_sample *x,
                                            const int32_t *stop, int32_t n_stop) {
    const struct synth_options *o = s->o;
    const struct token_ids *prompt = &s->prompts.v[x->prompt].tokens;
    return (struct engine_request){.prompt = prompt->v,
                                   .n_prompt = prompt->n,
                                   .adapter = s->adapter,
                                   .sampling = {.temperature = (float)o->temperature,
                                                .top_k = (int32_t)o->top_k,
                                                .top_p = (float)o->top_p,
                                                .min_p = (float)o->min_p,
                                                .seed = x->seed},
                                   .max_tokens =
                                       (int32_t)MIN(o->max_tokens, s->max_len - prompt->n),
                                   .stop = stop,
                                   .n_stop = n_stop,
                                   .loop_tokens = LOOP_TOKENS,
                                   .user = x};
}

/* Sets the text and the numbers of a sample whose tokens are set. sum: their log-probability. */
static void sample_finish(const struct synth *s, struct synth_sample *x, double sum,
                          enum finish_reason finish) {
    tokenizer_decode(s->model->tok, x->out.v, x->out.n, false, &x->text);
    buf_puts(&x->text, "");
    x->logprob = x->out.n ? sum / x->out.n : 0;
    x->finish = finish;
}

/* Sets the sample's result from a computed request. It sums in the same order as outputs_read, so a
 * sample from the store has the same bits. */
static void sample_set_result(const struct synth *s, struct synth_sample *x,
                              const struct engine_request *r) {
    double sum = 0;
    for (int32_t i = 0; i < r->n_out; i++) {
        token_ids_add(&x->out, r->out[i]);
        sum += (double)r->out_logprob[i];
    }
    sample_finish(s, x, sum, r->finish);
}

static bool field_is_text(const json_t *v, const char *key, const char *text) {
    const char *value = json_string_value(json_object_get(v, key));
    return value && strcmp(value, text) == 0;
}

/* Whether a stored call can replace a new one: results may differ between versions of Shoal. */
static bool call_is_usable(const json_t *call) {
    return field_is_text(call, "version", SHOAL_VERSION);
}

/* Sets the sample's result from the outputs of a stored call. If they are incomplete, sets nothing
 * and returns false. */
static bool outputs_read(const struct synth *s, struct synth_sample *x, const json_t *outputs) {
    const json_t *out = json_object_get(outputs, "out"),
                 *logprobs = json_object_get(outputs, "logprobs");
    size_t n = json_array_size(out), i;
    double sum = 0;
    enum finish_reason finish;
    bool is_valid = json_is_array(out) && json_array_size(logprobs) == n &&
                    finish_reason_find(json_get_string(outputs, "finish"), &finish) &&
                    finish != FINISH_NONE;
    for (i = 0; is_valid && i < n; i++) {
        const json_t *id = json_array_get(out, i), *logprob = json_array_get(logprobs, i);
        json_int_t token = json_integer_value(id);
        is_valid = json_is_integer(id) && token >= 0 && token < s->model->config.vocab_size &&
                   json_is_number(logprob);
        if (is_valid) token_ids_add(&x->out, (int32_t)token);
        if (is_valid) sum += (double)(float)json_number_value(logprob);
    }
    if (is_valid)
        sample_finish(s, x, sum, finish);
    else
        token_ids_release(&x->out);
    return is_valid;
}

/* Sets the sample's result from the store; false: the record is missing or unusable. */
static bool sample_from_cache(struct synth *s, struct synth_sample *x) {
    struct error none;
    json_t *call = s->calls ? store_record_get(s->calls, x->call, &none) : NULL;
    bool found =
        call && call_is_usable(call) && outputs_read(s, x, json_object_get(call, "outputs"));
    json_decref(call);
    s->n_reused += found;
    return found;
}

/* Generates a batch of samples from index *next on, and advances *next. It waits for the whole
 * batch, which is large enough to keep the engine's batch full most of the time. */
static int batch_generate(struct synth *s, struct engine_request *reqs, int *next,
                          struct error *err) {
    int32_t stop[2], n_stop = 0,
                     ends[2] = {tokenizer_eos(s->model->tok), tokenizer_eot(s->model->tok)};
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) stop[n_stop++] = ends[i];
    int n = 0;
    for (; *next < s->n && n < SYNTH_BATCH_SIZE; ++*next) {
        struct synth_sample *x = &s->v[*next];
        reqs[n] = sample_request(s, x, stop, n_stop);
        record_key(&reqs[n], s->model->hash, s->model->cls, s->kv, s->lora, x->call);
        n += !sample_from_cache(s, x);
    }
    int rc = engine_run(s->engine, reqs, n, NULL, err);
    for (int i = 0; i < n; i++) {
        if (rc == OK) sample_set_result(s, reqs[i].user, &reqs[i]);
        engine_request_release(&reqs[i]);
    }
    return rc;
}

int synth_generate(struct synth *s, struct error *err) {
    struct progress p;
    int64_t n = (int64_t)s->prompts.n * s->o->samples;
    if (!model_hash(s->model, err)) return err->code;
    if (n > 1 << 24) return error_set(err, ERR_USAGE, "more than %d answers", 1 << 24);
    s->v = try_calloc((size_t)n, sizeof *s->v, err);
    struct engine_request *reqs = s->v ? try_calloc(SYNTH_BATCH_SIZE, sizeof *reqs, err) : NULL;
    if (!reqs) return err->code;
    s->n = (int)n;
    for (int i = 0; i < s->n; i++) {
        struct synth_sample *x = &s->v[i];
        *x = (struct synth_sample){.prompt = i / (int)s->o->samples,
                                   .index = i % (int)s->o->samples,
                                   .filter = SYNTH_KEPT};
        x->seed = sample_seed(s, x);
    }
    progress_start(&p, "answers", n);
    int rc = OK;
    for (int next = 0; rc == OK && next < s->n;) {
        rc = batch_generate(s, reqs, &next, err);
        progress_update(&p, next, NULL);
    }
    progress_finish(&p, NULL);
    free(reqs);
    return rc;
}

/* perplexity */

static bool same_adapter(const struct adapter *a, const struct adapter *b) {
    return a && b ? strcmp(a->hash, b->hash) == 0 : a == b;
}

/* A request for the log-probabilities of prompt and answer, which it appends to `all`. */
static struct engine_request perplexity_request(const struct synth *s, struct synth_sample *x,
                                                struct token_ids *all) {
    const struct token_ids *prompt = &s->prompts.v[x->prompt].tokens;
    for (int32_t i = 0; i < prompt->n; i++) token_ids_add(all, prompt->v[i]);
    for (int32_t i = 0; i < x->out.n; i++) token_ids_add(all, x->out.v[i]);
    return (struct engine_request){.prompt = all->v,
                                   .n_prompt = all->n,
                                   .adapter = s->judge,
                                   .sampling = {.top_p = 1},
                                   .prompt_logprobs = true,
                                   .user = x};
}

static void perplexity_set_result(const struct synth *s, const struct engine_request *r) {
    struct synth_sample *x = r->user;
    double sum = 0;
    for (int32_t i = s->prompts.v[x->prompt].tokens.n; i < r->n_prompt; i++)
        sum += (double)r->prompt_logprob[i];
    x->perplexity = math_exp(-sum / x->out.n);
}

/* Computes the missing perplexities of a batch of samples from index *next on; advances *next. */
static int batch_score_perplexity(struct synth *s, struct engine_request *reqs,
                                  struct token_ids *all, int *next, struct error *err) {
    int n = 0;
    for (; *next < s->n && n < SYNTH_BATCH_SIZE; ++*next) {
        struct synth_sample *x = &s->v[*next];
        if (x->filter != SYNTH_KEPT || x->perplexity > 0 || x->out.n == 0) continue;
        if (same_adapter(s->judge, s->adapter)) // known from generation
            x->perplexity = math_exp(-x->logprob);
        else
            reqs[n] = perplexity_request(s, x, &all[n]), n++;
    }
    int rc = n ? engine_run(s->engine, reqs, n, NULL, err) : OK;
    for (int i = 0; i < n; i++) {
        if (rc == OK) perplexity_set_result(s, &reqs[i]);
        engine_request_release(&reqs[i]);
        token_ids_release(&all[i]);
    }
    return rc;
}

int synth_score_perplexity(struct synth *s, struct error *err) {
    struct engine_request *reqs = try_calloc(SYNTH_BATCH_SIZE, sizeof *reqs, err);
    struct token_ids *all = reqs ? try_calloc(SYNTH_BATCH_SIZE, sizeof *all, err) : NULL;
    int rc = all ? OK : err->code;
    for (int next = 0; rc == OK && next < s->n;)
        rc = batch_score_perplexity(s, reqs, all, &next, err);
    free(all);
    free(reqs);
    return rc;
}

/* lines */

static json_t *hash_json(const struct adapter *a) {
    return a ? json_string(a->hash) : json_null();
}

/* The origin of a sample, by which its call can be found in the store, or repeated. It names the
 * instruction set only for the class "fast", so runs of the class "exact" write the same file on
 * every machine. */
static json_t *source_json(const struct synth *s, const struct synth_sample *x) {
    const struct model *m = s->model;
    json_t *scores = json_pack("{s:o,s:o}", "logprob", json_from_float((float)x->logprob),
                               "agreement", json_from_float((float)x->agreement));
    json_t *v = json_pack("{s:s,s:s,s:s,s:o,s:s,s:I,s:i,s:i,s:o}", "call", x->call, "model",
                          m->name, "model_hash", m->hash, "adapter_hash", hash_json(s->adapter),
                          "class", numeric_class_name(m->cls), "seed", (json_int_t)x->seed,
                          "sample", x->index, "tokens", x->out.n, "scores", scores);
    if (m->cls == NUMERIC_FAST) json_object_set_new(v, "level", json_string(kernels_get()->name));
    if (x->perplexity > 0) {
        json_object_set_new(scores, "perplexity", json_from_float((float)x->perplexity));
        json_object_set_new(v, "judge_hash", hash_json(s->judge));
    }
    return v;
}

int synth_format_jsonl(const struct synth *s, struct buf *out, struct error *err) {
    for (int i = 0; i < s->n; i++) {
        const struct synth_sample *x = &s->v[i];
        if (x->filter != SYNTH_KEPT) continue;
        json_t *messages = json_deep_copy(s->prompts.v[x->prompt].messages);
        json_array_append_new(messages, json_pack("{s:s,s:s%}", "role", "assistant", "content",
                                                  x->text.data, x->text.len));
        json_t *v = json_pack("{s:o,s:o}", "messages", messages, "source", source_json(s, x));
        char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
        CHECK(text != NULL);
        int rc = buf_reserve(out, strlen(text) + 2, err);
        if (rc == OK) buf_puts(out, text), buf_puts(out, "\n");
        free(text);
        json_decref(v);
        if (rc != OK) return rc;
    }
    return OK;
}

void synth_release(struct synth *s) {
    for (int i = 0; i < s->n; i++) {
        buf_release(&s->v[i].text);
        token_ids_release(&s->v[i].out);
    }
    free(s->v);
    s->v = NULL;
    s->n = 0;
    synth_prompts_release(&s->prompts);
}
