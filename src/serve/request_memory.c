/*
 * request_memory: an upper bound of the bytes that a request needs, computed from its fields before
 * it is admitted.
 *
 * The constants are the sizes of jansson's values, the engine's results and text in growing
 * buffers. The length of a token's text is the vocabulary's average; if a client steers a reply to
 * longer tokens, the writer of the reply reserves more as it proceeds (lazy_list_add). Only
 * request_memory_json allocates memory for a request.
 */
#define _GNU_SOURCE
#include "serve/generation.h"
#include "serve/request_fields.h"
#include "serve/sample_filter.h"

#include <string.h>
#include <sys/stat.h>

enum {
    MB = 1 << 20,
    BUDGET_DEFAULT = 512 * MB,
    REPLIES_KEPT = 16 * MB, /* maximum bytes of replies that can be rated */
    GRAMMARS_KEPT =
        64 * MB,       /* maximum bytes of compiled grammars; their token masks may have as many */
    VALUE_BYTES = 112, /* bytes of a JSON value with its key */
    CONTAINER_BYTES = 320,  /* bytes of a JSON array or object without its members */
    TEXT_FACTOR = 24,       /* bytes needed to tokenize a byte of text */
    ANSWER_BYTES = 4 << 10, /* bytes of a completion without its tokens */
    REQUEST_BYTES = 16 << 10,
    SCORE_BYTES = 96,        /* bytes of a log-probability as text, without the token */
    LEGACY_SCORE_BYTES = 40, /* the same in the lists of /v1/completions with 'echo' */
};

size_t token_piece_bytes(const struct tokenizer *tok) {
    size_t all = 0, n = (size_t)tokenizer_vocab_size(tok);
    for (size_t i = 0; i < n; i++) all += strlen(tokenizer_id_to_piece(tok, (int32_t)i, NULL));
    return all / MAX(n, (size_t)1) + 2;
}

void request_memory_open(struct server *s) {
    size_t most = (size_t)s->options->request_memory;
    if (most == 0) most = BUDGET_DEFAULT;
    s->reply_log_bytes = MIN((size_t)REPLIES_KEPT, most / 8);
    s->grammar_cache_bytes = MIN((size_t)GRAMMARS_KEPT, most / 16);
    s->memory = memory_budget_new(most - s->reply_log_bytes - 2 * s->grammar_cache_bytes);
}

int request_memory_reserve(struct server *s, struct exchange *x, size_t bytes, struct error *err) {
    return memory_budget_reserve(s->memory, x, bytes, err);
}

/* Bytes of the values that a JSON text is parsed to. Unlike json_parse_memory it also counts inside
 * strings, because the arguments of tool calls are JSON in a string that is parsed as well. */
static size_t json_tree_bytes(const struct buf *b) {
    size_t bytes = b->len;
    for (size_t i = 0; i < b->len; i++) {
        char c = b->data[i];
        if (c == '{' || c == '[') bytes += CONTAINER_BYTES;
        if (c == ',' || c == ':') bytes += VALUE_BYTES;
    }
    return bytes;
}

json_t *request_memory_json(struct server *s, struct exchange *x, struct error *err) {
    const struct buf *body = exchange_body(x);
    size_t bytes = json_tree_bytes(body) + TEXT_FACTOR * body->len;
    if (request_memory_reserve(s, x, bytes, err) != OK) {
        error_wrap(err, "the body");
        return NULL;
    }
    json_t *v = exchange_json(x, err);
    if (!v && err->code == ERR_FORMAT) request_text_check(body->data, body->len, err);
    if (!v || body_fields_check(exchange_path(x), v, err) == OK) return v;
    json_decref(v);
    return NULL;
}

int token_ids_check_memory(const struct token_ids *ids, struct error *err) {
    if (!ids->failed) return OK;
    return error_set(err, ERR_MEMORY, "the server is short of memory for this text");
}

int request_memory_reserve_list(struct server *s, struct exchange *x, int64_t n, size_t each,
                                const char *what, struct error *err) {
    if (request_memory_reserve(s, x, (size_t)n * each, err) == OK) return OK;
    return err->code == ERR_USAGE && what ? error_wrap(err, "'%s'", what) : err->code;
}

int request_memory_reserve_file(struct server *s, struct exchange *x, const char *path,
                                size_t factor, struct error *err) {
    struct stat st;
    if (stat(path, &st) != 0 ||
        request_memory_reserve(s, x, (size_t)MAX(st.st_size, 0) * factor, err) == OK)
        return OK;
    return error_wrap(err, "'%s'", path);
}

/* Bytes of a request, by the field of the request that determines them. */
struct memory_need {
    size_t prompt, tokens, scores, prompt_scores;
};

/* Bytes of the log-probabilities of n tokens with n_top alternatives each, as text in a growing
 * buffer with spare room. */
static size_t scores_text_bytes(const struct server *s, size_t n, int n_top, size_t each) {
    return n * (1 + (size_t)n_top) * (each + 3 * s->piece_bytes) * 5 / 4;
}

/* Bytes of one completion of n tokens for a prompt of n_prompt tokens. */
static struct memory_need completion_need(const struct server *s,
                                          const struct generation_spec *spec, size_t n_prompt,
                                          size_t n) {
    size_t piece = s->piece_bytes, n_top = (size_t)MAX(spec->n_top, spec->n_prompt_top),
           results = (1 + n_top) * (sizeof(int32_t) + sizeof(float));
    struct memory_need need = {.prompt =
                                   ANSWER_BYTES + n_prompt * (6 * piece + 2 * sizeof(int32_t)),
                               .tokens = n * (sizeof(size_t) + 12 * piece + 3 * VALUE_BYTES / 2),
                               .scores = n * results};
    if (spec->reasoning_begin) need.tokens += 2 * n * piece; // a copy of the text, with spare room
    if (spec->grammar) need.tokens += (size_t)tokenizer_vocab_size(s->model->tok) / 8 + 64 * 1024;
    if (spec->filter) need.tokens += sample_filter_bytes(spec->filter);
    if (spec->logprobs) need.scores += scores_text_bytes(s, n, spec->n_top, SCORE_BYTES);
    if (spec->prompt_logprobs) need.prompt_scores = n_prompt * results;
    if (spec->logprobs && spec->echo)
        need.prompt_scores += scores_text_bytes(s, n_prompt, spec->n_top, LEGACY_SCORE_BYTES);
    if (spec->prompt_tops)
        need.prompt_scores += scores_text_bytes(s, n_prompt, spec->n_prompt_top, SCORE_BYTES);
    return need;
}

static const char *largest_need_field(const struct memory_need *need,
                                      const struct generation_spec *spec) {
    size_t most = MAX(MAX(need->prompt, need->tokens), MAX(need->scores, need->prompt_scores));
    if (most == need->prompt_scores) return spec->prompt_tops ? "prompt_logprobs" : "logprobs";
    if (most == need->scores) return "logprobs";
    if (spec->n > 1) return spec->filter ? "samples" : "n";
    return most == need->tokens ? "max_tokens" : "prompt";
}

int generation_reserve(struct server *s, struct exchange *x, const struct generation_spec *spec,
                       const char **what, struct error *err) {
    struct memory_need all = {0};
    for (int i = 0; i < spec->n_prompts; i++) {
        size_t n_prompt = (size_t)spec->prompts[i].n,
               n = (size_t)reply_max_tokens(s, spec, spec->prompts[i].n), answers = (size_t)spec->n;
        struct memory_need one = completion_need(s, spec, n_prompt, n);
        all.prompt += answers * one.prompt;
        all.tokens += answers * one.tokens;
        all.scores += answers * one.scores;
        all.prompt_scores += answers * one.prompt_scores;
    }
    size_t bytes = REQUEST_BYTES + json_tree_bytes(exchange_body(x)) + all.prompt + all.tokens +
                   all.scores + all.prompt_scores;
    *what = largest_need_field(&all, spec);
    if (memory_budget_set(s->memory, x, bytes, err) == OK) return OK;
    return err->code == ERR_USAGE ? error_wrap(err, "'%s'", *what) : err->code;
}
