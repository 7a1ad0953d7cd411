/* shoal run MODEL: generate from a prompt or a chat message, with or without an adapter. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *prompt, *chat, *system, *adapter;
    int64_t n, top_k, seed;
    double temp, top_p, min_p;
    struct strings choices;
    bool ids;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("p", OPT_STRING, prompt, NULL, 0, 0, "TEXT", "text to continue; may be empty"),
    ROW("chat", OPT_STRING, chat, NULL, 0, 0, "TEXT",
        "a user's message instead: ChatML is put around it"),
    ROW("system", OPT_STRING, system, NULL, 0, 0, "TEXT", "system message before it"),
    ROW("adapter", OPT_STRING, adapter, NULL, 0, 0, "DIR", "PEFT directory"),
    ROW("choices", OPT_LIST, choices, NULL, 0, 0, "TEXT …",
        "choose among these instead, with exact probabilities"),
    ROW("n", OPT_INT, n, "64", 1, 1e6, "N", "tokens to generate at most"),
    ROW("temp", OPT_FLOAT, temp, "0.7", 0, 100, "T", "temperature; 0: greedy"),
    ROW("top-k", OPT_INT, top_k, "0", 0, 1e6, "K", "only the K most probable; 0: all"),
    ROW("top-p", OPT_FLOAT, top_p, "0.9", 0, 1, "P", "only the smallest set with probability P"),
    ROW("min-p", OPT_FLOAT, min_p, "0", 0, 1, "P",
        "only those at least P times as probable as the best"),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15, "N", "of the sampling"),
    ROW("ids", OPT_BOOL, ids, NULL, 0, 0, NULL, "print token ids instead of text"),
    {0},
};
#undef ROW

static int encode_prompt(const struct model *m, const struct options *o, struct ids *out,
                         struct error *err) {
    if (!m->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->path);
    if (!o->prompt == !o->chat)
        return error_set(err, ERR_USAGE, "give one of -p TEXT and --chat TEXT");
    if (o->prompt) {
        tok_encode(m->tok, o->prompt, strlen(o->prompt), TOK_BOS | TOK_SPECIAL, out);
        /* A model that adds no BOS still needs something to start from. */
        int32_t first = tok_bos(m->tok) >= 0 ? tok_bos(m->tok) : tok_eos(m->tok);
        if (out->n == 0 && first >= 0) ids_add(out, first);
    } else {
        struct message msgs[2] = {{"system", o->system}, {"user", o->chat}};
        int n = 1 + !!o->system;
        if (chat_encode(m->tok, msgs + !o->system, n, true, out, NULL, err) != OK) return err->code;
    }
    return out->n
               ? OK
               : error_set(err, ERR_USAGE, "the prompt is empty and the model has no first token");
}

static void print_text(const struct common *c, const struct model *m, const struct request *r) {
    struct buf text = {0};
    tok_decode_all(m->tok, r->out, r->n_out, false, &text);
    if (c->json) {
        json_t *ids = json_array();
        for (int i = 0; i < r->n_out; i++) json_array_append_new(ids, json_integer(r->out[i]));
        json_t *s = json_stringn(text.data ? text.data : "", text.len);
        cli_print(json_pack("{s:o,s:o,s:s,s:i,s:i}", "text", s ? s : json_null(), "ids", ids,
                            "finish", r->finish == FINISH_LENGTH ? "length" : "stop", "prefilled",
                            r->n_prefilled, "generated", r->n_generated));
    } else {
        fwrite(text.data ? text.data : "", 1, text.len, stdout);
        putchar('\n');
    }
    buf_release(&text);
}

static void print_choices(const struct common *c, const struct options *o,
                          const struct request *r) {
    for (int i = 0; i < r->n_choices; i++) {
        if (c->json)
            cli_print(json_pack("{s:s,s:f,s:f,s:b}", "choice", o->choices.v[i], "prob",
                                (double)r->choice_prob[i], "logprob", (double)r->choice_logprob[i],
                                "chosen", (int)(i == r->choice)));
        else
            printf("%s %6.2f %%  %s\n", i == r->choice ? "*" : " ", 100 * (double)r->choice_prob[i],
                   o->choices.v[i]);
    }
}

static void print_ids(const struct request *r) {
    for (int i = 0; i < r->n_out; i++) printf("%s%d", i ? " " : "", r->out[i]);
    putchar('\n');
}

static int generate(const struct common *c, const struct options *o, struct model *m,
                    struct adapter *a, struct pool *pool, struct error *err) {
    struct ids prompt = {0}, chosen[64] = {{0}};
    struct token_seq seq[64];
    int rc = encode_prompt(m, o, &prompt, err);
    if (rc == OK && o->choices.n > 64) rc = error_set(err, ERR_USAGE, "more than 64 choices");
    int n_choices = rc == OK ? o->choices.n : 0, longest = 0;
    for (int i = 0; i < n_choices; i++) {
        tok_encode(m->tok, o->choices.v[i], strlen(o->choices.v[i]), 0, &chosen[i]);
        seq[i] = (struct token_seq){chosen[i].v, chosen[i].n};
        longest = MAX(longest, chosen[i].n);
    }
    int32_t stop[2], n_stop = 0, ends[2] = {tok_eos(m->tok), tok_chat_end(m->tok)};
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) stop[n_stop++] = ends[i];
    struct request r = {.prompt = prompt.v,
                        .n_prompt = prompt.n,
                        .adapter = a,
                        .stop = stop,
                        .n_stop = n_stop,
                        .sampling = {.temperature = (float)o->temp,
                                     .top_k = (int32_t)o->top_k,
                                     .top_p = (float)o->top_p,
                                     .min_p = (float)o->min_p,
                                     .seed = (uint64_t)o->seed},
                        .max_tokens = n_choices ? 0 : (int32_t)o->n,
                        .choices = seq,
                        .n_choices = n_choices};
    struct engine_options eo = {.max_rows = 256,
                                .max_seqs = 1,
                                .pool = pool,
                                .max_len = prompt.n + MAX((int32_t)o->n, longest) + 1};
    eo.max_len = MIN(eo.max_len, m->config.max_seq_len);
    r.max_tokens = MIN(r.max_tokens, MAX(0, eo.max_len - prompt.n));
    struct engine *e = rc == OK ? engine_new(m, &eo, err) : NULL;
    if (rc == OK) rc = e ? engine_run(e, &r, 1, NULL, err) : err->code;
    if (rc == OK && n_choices)
        print_choices(c, o, &r);
    else if (rc == OK && o->ids)
        print_ids(&r);
    else if (rc == OK)
        print_text(c, m, &r);
    engine_free(e);
    request_release(&r);
    ids_release(&prompt);
    for (int i = 0; i < 64; i++) ids_release(&chosen[i]);
    return rc;
}

static int run(const struct common *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    char *path = cli_find(args->v[0]);
    struct pool *pool = pool_new((int)c->threads);
    struct model *m = model_open(path, cli_class(c), err);
    struct adapter *a = m && o->adapter ? adapter_open(o->adapter, m, err) : NULL;
    int rc = m && (a || !o->adapter) ? generate(c, o, m, a, pool, err) : err->code;
    adapter_release(a);
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

const struct command cmd_run = {
    .name = "run",
    .args = "MODEL",
    .summary = "generate text, or choose with exact probabilities",
    .about = "  shoal run models/fry --chat 'sort: k b x' --temp 0\n"
             "  shoal run models/fry --chat '412と907、大きいのは？' --temp 0\n"
             "  shoal run model.gguf -p 'Once upon a time' -n 100 --adapter "
             "runs/ID/adapters/gen_0/critic\n"
             "  shoal run models/fry -p 'yes or' --choices ' no' ' yes'",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
