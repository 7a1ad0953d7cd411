/*
 * cmd_run: `shoal run MODEL`: generates from prompts or chat messages, with an adapter, a mix of
 * adapters, or the base model.
 *
 * All prompts and all samples of each are requests of one batch. Text output is for people;
 * log-probabilities and the key of a call are printed with --json only.
 */
#define _GNU_SOURCE
#include "cli/generate.h"
#include "cli/sample_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct sampling_options sampling;
    char *prompt, *chat, *system, *file, *adapter, *session;
    int64_t samples, logprobs;
    struct strings choices, stop, logit_bias;
    bool ids, echo, prompt_logprobs;
    char *json_schema, *regex, *gbnf, *template_kwargs, *check;
    bool check_sandbox;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("p", OPT_STRING, prompt, NULL, 0, 0, "TEXT", "text to continue; may be empty"),
    ROW("chat", OPT_STRING, chat, NULL, 0, 0, "TEXT",
        "a user's message; the model's chat template is applied"),
    ROW("system", OPT_STRING, system, NULL, 0, 0, "TEXT", "system message before --chat"),
    ROW("chat-template-kwargs", OPT_STRING, template_kwargs, NULL, 0, 0, "JSON",
        "additional variables of the chat template, as '{\"enable_thinking\": false}'"),
    ROW("file", OPT_STRING, file, NULL, 0, 0, "FILE",
        "file of prompts: one per line, or JSON Lines of {prompt}, {chat, system} or "
        "{messages, tools, chat_template_kwargs}"),
    ROW("samples", OPT_INT, samples, "1", 1, 4096, "N",
        "samples per prompt; sample i uses seed + i"),
    ROW("check", OPT_STRING, check, NULL, 0, 0, "CHECK",
        "print the most frequent answer of the samples that pass, such as calculator, "
        "json-schema:FILE, command:WORDS (docs/EVALUATION.md)"),
    ROW("check-sandbox", OPT_BOOL, check_sandbox, "true", 0, 0, NULL,
        "run commands of --check in the sandbox"),
    ROW("adapter", OPT_STRING, adapter, NULL, 0, 0, "DIR",
        "adapter, or a weighted sum of several, such as A=0.7,B=0.3 (A,B: weights 1)"),
    ROW("choices", OPT_LIST, choices, NULL, 0, 0, "TEXT",
        "choose among these texts, with exact probabilities, instead of generating"),
    ROW("max-tokens", OPT_INT, sampling.max_tokens, "64", 1, 1e6, "N",
        "maximum tokens to generate"),
    ROW("temperature", OPT_FLOAT, sampling.temperature, "0.7", 0, 100, "X",
        "sampling temperature; 0: greedy"),
    SAMPLING_ROWS(struct options, sampling),
    ROW("logit-bias", OPT_LIST, logit_bias, NULL, 0, 0, "ID=X",
        "add X to the logit of a token id; -inf forbids the token"),
    ROW("stop", OPT_LIST, stop, NULL, 0, 0, "TEXT", "stop before any of these texts"),
    ROW("json-schema", OPT_STRING, json_schema, NULL, 0, 0, "FILE",
        "constrain the answer to JSON of this schema; it is complete if --max-tokens allows"),
    ROW("regex", OPT_STRING, regex, NULL, 0, 0, "RE",
        "constrain the whole answer to this regular expression"),
    ROW("grammar", OPT_STRING, gbnf, NULL, 0, 0, "FILE",
        "constrain the answer to this GBNF grammar"),
    ROW("logprobs", OPT_INT, logprobs, "0", 0, ENGINE_TOP_MAX, "N",
        "report the N most probable tokens at each position (--json)"),
    ROW("prompt-logprobs", OPT_BOOL, prompt_logprobs, NULL, 0, 0, NULL,
        "report log-probabilities of the prompt as well (--json)"),
    ROW("echo", OPT_BOOL, echo, NULL, 0, 0, NULL, "print the prompt before the answer"),
    ROW("ids", OPT_BOOL, ids, NULL, 0, 0, NULL, "print token ids instead of text"),
    ROW("session", OPT_STRING, session, NULL, 0, 0, "FILE",
        "KV cache of the sequence: loaded if the file exists, saved at the end; an empty prompt "
        "continues it"),
    SETUP_ROWS(struct options, setup),
    CLUSTER_ROWS(struct options, setup.cluster),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

/* The inputs and requests of the command. Request i is sample i % samples of prompt i / samples. */
struct run_job {
    const struct cli_options *c;
    const struct options *o;
    const char *message; /* the argument after MODEL, or NULL */
    struct prompts prompts;
    struct token_ids *tokens;     /* [prompts.n] */
    struct token_ids *choice_ids; /* [choices.n] */
    struct token_seq *choice;     /* [choices.n] */
    struct logit_bias *bias;
    int n_bias;
    int32_t stop[2], n_stop;
    struct adapter_mix mix;
    struct grammar *grammar;
    struct sample_check check; /* --check */
    struct engine_request *reqs;
    int n;
};

/* Refuses flags that would have no effect. */
static int flags_check(const struct cli_options *c, const struct options *o, const char *message,
                       struct error *err) {
    if (!c->json && (o->logprobs || o->prompt_logprobs))
        return error_set(err, ERR_USAGE, "'--%s' is printed with --json only",
                         o->logprobs ? "logprobs" : "prompt-logprobs");
    if (o->choices.n && (o->logprobs || o->prompt_logprobs || o->echo || o->stop.n || o->ids))
        return error_set(err, ERR_USAGE,
                         "with '--choices' nothing is generated: '--%s' has no effect",
                         o->stop.n     ? "stop"
                         : o->echo     ? "echo"
                         : o->ids      ? "ids"
                         : o->logprobs ? "logprobs"
                                       : "prompt-logprobs");
    if (o->ids && o->echo) return error_set(err, ERR_USAGE, "'--echo' prints text, '--ids' none");
    if (o->check && (o->choices.n || o->ids || o->session))
        return error_set(err, ERR_USAGE, "'--check' selects a text: it does not go with '--%s'",
                         o->choices.n ? "choices"
                         : o->ids     ? "ids"
                                      : "session");
    if (o->session && (o->file || o->samples > 1))
        return error_set(err, ERR_USAGE, "'--session' takes one prompt and one sample");
    if (!!o->json_schema + !!o->regex + !!o->gbnf > 1)
        return error_set(err, ERR_USAGE, "give one of --json-schema, --regex and --grammar");
    if ((o->json_schema || o->regex || o->gbnf) && o->choices.n)
        return error_set(err, ERR_USAGE, "'--choices' are the answers: no grammar goes with them");
    if (o->system && !o->chat && !message)
        return error_set(err, ERR_USAGE, "'--system' goes before a message: it needs --chat");
    if (o->chat && message)
        return error_set(err, ERR_USAGE, "two messages are given: '%s' and '%s'", message, o->chat);
    return OK;
}

/* Parses "5=1.5,7=-inf". The biases of a repeated token add up. */
static int bias_parse(struct run_job *j, const char *text, struct error *err) {
    for (const char *at = text; *at;) {
        char *end, *after;
        long id = strtol(at, &end, 10);
        double x = *end == '=' ? strtod(end + 1, &after) : 0;
        if (end == at || *end != '=' || after == end + 1 || (*after && *after != ',') || isnan(x) ||
            id < 0 || id > INT32_MAX)
            return error_set(err, ERR_USAGE, "'%s' is not a logit bias; write ID=X,ID=X", text);
        j->bias = xrealloc(j->bias, sizeof *j->bias * (size_t)(j->n_bias + 1));
        j->bias[j->n_bias++] = (struct logit_bias){(int32_t)id, (float)x};
        at = after + (*after == ',');
    }
    return OK;
}

static int grammar_read(struct run_job *j, struct error *err) {
    const struct options *o = j->o;
    const char *path = o->json_schema ? o->json_schema : o->gbnf;
    struct buf text = {0};
    if (o->regex) j->grammar = grammar_new_regex(o->regex, strlen(o->regex), err);
    if (path && file_read(path, 1 << 24, &text, err) != OK) {
        buf_release(&text);
        return err->code;
    }
    const char *source = text.data ? text.data : "";
    if (o->json_schema) j->grammar = grammar_new_json_schema(source, text.len, false, err);
    if (o->gbnf) j->grammar = grammar_new_gbnf(source, text.len, err);
    buf_release(&text);
    if ((path || o->regex) && !j->grammar) return path ? error_wrap(err, "'%s'", path) : err->code;
    return OK;
}

/* Reads and checks every input that does not need the model. */
static int job_read(struct run_job *j, struct error *err) {
    const struct options *o = j->o;
    int rc = flags_check(j->c, o, j->message, err);
    if (rc == OK)
        rc = prompts_read(&j->prompts, o->prompt, j->message ? j->message : o->chat, o->system,
                          o->file, o->template_kwargs, err);
    if (rc == OK && j->message) j->prompts.v[0].template_optional = !o->system;
    for (int i = 0; rc == OK && i < o->logit_bias.n; i++)
        rc = bias_parse(j, o->logit_bias.v[i], err);
    if (rc == OK) rc = adapter_mix_parse(&j->mix, o->adapter, err);
    if (rc == OK && j->mix.weighted && o->session)
        rc = error_set(err, ERR_USAGE, "'--session' is kept under one adapter, not under a mix");
    if (rc == OK) rc = grammar_read(j, err);
    j->n = j->prompts.n * (int)o->samples;
    if (rc == OK && o->check)
        rc = sample_check_open(&j->check, o->check, o->check_sandbox, &j->prompts, (int)o->samples,
                               err);
    return rc;
}

/* Upper bounds for the engine and the requests before anything is tokenized: a token has at least
 * one byte. */
static struct setup_needs job_needs(const struct run_job *j) {
    const struct options *o = j->o;
    size_t longest = j->prompts.longest, choice = 0;
    for (int i = 0; i < o->choices.n; i++) choice = MAX(choice, strlen(o->choices.v[i]));
    size_t len = longest + MAX((size_t)o->sampling.max_tokens, choice);
    size_t numbers = len * (size_t)(1 + 2 * o->logprobs);
    return (struct setup_needs){.engine = {.max_rows = 256,
                                           .max_seqs = MIN(j->n, 64),
                                           .max_len = o->session ? 0 : (int32_t)MIN(len, 1 << 30)},
                                .adapters = &j->mix.paths,
                                .work = numbers * (8 * (size_t)j->n + 128),
                                .session = o->session};
}

/* Whether the prompt is empty and a session exists, which is continued then. */
static bool session_continues(const struct run_job *j) {
    const struct options *o = j->o;
    const char *text = o->prompt ? o->prompt : j->message ? j->message : o->chat;
    return o->session && text && !*text && path_exists(o->session);
}

/* Encodes prompts and choices. A reply ends with the model's end of text or of a chat turn. */
static int job_encode(struct run_job *j, const struct model *m, struct error *err) {
    const struct strings *choices = &j->o->choices;
    if (!m->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->path);
    j->tokens = xcalloc((size_t)j->prompts.n, sizeof *j->tokens);
    bool continues = session_continues(j);
    if (continues && session_read_tokens(j->o->session, &j->tokens[0], err) != OK) return err->code;
    for (int i = 0; !continues && i < j->prompts.n; i++)
        if (prompt_encode(m, &j->prompts.v[i], &j->tokens[i], err) != OK) return err->code;
    j->choice_ids = xcalloc((size_t)MAX(choices->n, 1), sizeof *j->choice_ids);
    j->choice = xcalloc((size_t)MAX(choices->n, 1), sizeof *j->choice);
    for (int i = 0; i < choices->n; i++) {
        tokenizer_encode(m->tok, choices->v[i], strlen(choices->v[i]), 0, &j->choice_ids[i]);
        j->choice[i] = (struct token_seq){j->choice_ids[i].v, j->choice_ids[i].n};
    }
    j->n_stop = model_stop_tokens(m, j->stop);
    return OK;
}

/* max_tokens is limited to the room after the prompt. Its value is part of the request key; it
 * depends on the memory plan only for a session whose reply reaches the end of the context. */
static void job_requests_init(struct run_job *j, int32_t max_len) {
    const struct options *o = j->o;
    struct engine_request *r;
    j->reqs = xcalloc((size_t)j->n, sizeof *j->reqs);
    for (int i = 0; i < j->n; i++) {
        const struct token_ids *prompt = &j->tokens[i / (int)o->samples];
        int32_t room = MAX(0, max_len - prompt->n);
        r = &j->reqs[i];
        *r = (struct engine_request){
            .prompt = prompt->v,
            .n_prompt = prompt->n,
            .sampling = sampling_from_options(&o->sampling, i % (int)o->samples),
            .max_tokens = o->choices.n ? 0 : (int32_t)MIN(o->sampling.max_tokens, room),
            .stop = j->stop,
            .n_stop = j->n_stop,
            .stop_texts = (const char *const *)o->stop.v,
            .n_stop_texts = o->stop.n,
            .grammar = j->grammar,
            .loop_tokens = (int32_t)o->sampling.loop_tokens,
            .n_top = (int32_t)o->logprobs,
            .prompt_logprobs = o->prompt_logprobs,
            .choices = j->choice,
            .n_choices = o->choices.n,
        };
        r->sampling.bias = j->bias;
        r->sampling.n_bias = j->n_bias;
        adapter_mix_apply(&j->mix, r);
    }
}

/* The generated text, cut before a stop text. */
static void answer_text(const struct model *m, const struct engine_request *r, struct buf *text) {
    if (r->n_stop_texts)
        buf_add(text, r->text.data, r->text.len);
    else
        tokenizer_decode(m->tok, r->out, r->n_out, false, text);
    buf_puts(text, "");
}

static json_t *text_json(const struct buf *text) {
    json_t *s = json_stringn(text->data, text->len);
    return s ? s : json_null(); // bytes that are not UTF-8
}

static void json_merge(json_t *into, json_t *from) {
    json_object_update_missing(into, from);
    json_decref(from);
}

/* The inputs that determine the answer, by name and content hash; enough to repeat the call. */
static json_t *call_json(const struct run_job *j, const struct setup *s, int i, const char *hash) {
    const struct engine_request *r = &j->reqs[i];
    char key[HASH_LEN];
    record_key(r, hash, s->m->cls, s->engine.kv_elem, s->engine.lora_elem, key);
    return json_pack("{s:i,s:i,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:I,s:o,s:i,s:i}", "index",
                     i / (int)j->o->samples, "sample", i % (int)j->o->samples, "call", key, "model",
                     s->path, "model_hash", hash, "class", numeric_class_name(s->m->cls), "level",
                     kernels_get()->name, "kv", dtype_name(s->engine.kv_elem), "lora",
                     dtype_name(s->engine.lora_elem), "seed", (json_int_t)r->sampling.seed,
                     "adapters", record_adapters_json(r, s->adapters, s->n_adapters), "prefilled",
                     r->n_prefilled, "generated", r->n_generated);
}

/* An answer as JSON; without members that no flag requests. */
static json_t *answer_json(const struct run_job *j, const struct setup *s, int i,
                           const char *hash) {
    const struct engine_request *r = &j->reqs[i];
    struct buf text = {0};
    answer_text(s->m, r, &text);
    json_t *v = call_json(j, s, i, hash), *out = record_outputs_json(r);
    json_object_set_new(v, "text", text_json(&text));
    json_object_set(v, "ids", json_object_get(out, "out"));
    json_object_del(out, "out");
    if (r->n_top == 0) json_object_del(out, "top");
    if (!r->prompt_logprobs) json_object_del(out, "prompt_logprobs");
    if (!r->prompt_logprobs || r->n_top == 0) json_object_del(out, "prompt_top");
    json_object_del(out, "choice");
    json_object_del(out, "choice_probs");
    json_object_del(out, "choice_logprobs");
    if (j->o->check) {
        const int prompt = i / (int)j->o->samples, sample = i % (int)j->o->samples;
        json_object_set_new(v, "passed", json_boolean(j->check.samples.v[i].passed));
        json_object_set_new(v, "selected", json_boolean(j->check.selected[prompt] == sample));
    }
    if (j->o->echo)
        json_object_set_new(v, "prompt", json_string(j->prompts.v[i / (int)j->o->samples].text));
    json_t *in = record_inputs_json(r);
    json_object_set(v, "prompt_ids", json_object_get(in, "prompt"));
    json_decref(in);
    json_merge(v, out);
    buf_release(&text);
    return v;
}

static void print_choices(const struct run_job *j, const struct setup *s, int at,
                          const char *hash) {
    const struct engine_request *r = &j->reqs[at];
    for (int i = 0; i < r->n_choices; i++) {
        const char *text = j->o->choices.v[i];
        if (j->c->json) {
            json_t *v =
                json_pack("{s:s,s:f,s:f,s:b}", "choice", text, "prob", (double)r->choice_prob[i],
                          "logprob", (double)r->choice_logprob[i], "chosen", (int)(i == r->choice));
            json_merge(v, call_json(j, s, at, hash));
            cli_print_json(v);
        } else {
            printf("%s %6.2f %%  %s\n", i == r->choice ? "*" : " ", 100 * (double)r->choice_prob[i],
                   text);
        }
    }
}

static void print_ids(const struct engine_request *r) {
    for (int i = 0; i < r->n_out; i++) printf("%s%d", i ? " " : "", r->out[i]);
    putchar('\n');
}

static void print_text(const struct run_job *j, const struct model *m, int i) {
    struct buf text = {0};
    if (j->o->echo) buf_puts(&text, j->prompts.v[i / (int)j->o->samples].text);
    answer_text(m, &j->reqs[i], &text);
    fwrite(text.data, 1, text.len, stdout);
    putchar('\n');
    buf_release(&text);
}

static int job_print(const struct run_job *j, const struct setup *s, struct error *err) {
    const char *hash = j->c->json ? model_hash(s->m, err) : "";
    if (!hash) return err->code;
    for (int i = 0; i < j->n; i++) {
        if (j->o->choices.n)
            print_choices(j, s, i, hash);
        else if (j->c->json)
            cli_print_json(answer_json(j, s, i, hash));
        else if (j->o->check && j->check.selected[i / (int)j->o->samples] != i % (int)j->o->samples)
            continue;
        else if (j->o->ids)
            print_ids(&j->reqs[i]);
        else
            print_text(j, s->m, i);
    }
    return OK;
}

/* Loads --session if the file exists. A file of another model, numeric class or dtype is an error.
 */
static int session_load(const struct run_job *j, struct setup *s, struct error *err) {
    int32_t n;
    if (!j->o->session || !path_exists(j->o->session)) return OK;
    const char *hash = model_hash(s->m, err);
    int rc = hash ? engine_session_load(s->e, hash, j->o->session, &n, err) : err->code;
    if (rc == OK) log_info("'%s' holds %d tokens", j->o->session, n);
    return rc;
}

static int session_save(const struct run_job *j, struct setup *s, struct error *err) {
    if (!j->o->session) return OK;
    const struct engine_request *r = &j->reqs[0];
    const char *hash = model_hash(s->m, err);
    struct token_ids all = {0};
    for (int i = 0; i < r->n_prompt; i++) token_ids_add(&all, r->prompt[i]);
    for (int i = 0; i < r->n_out; i++) token_ids_add(&all, r->out[i]);
    int rc = hash ? engine_session_save(s->e, (struct token_seq){all.v, all.n}, r->adapter, hash,
                                        j->o->session, err)
                  : err->code;
    token_ids_release(&all);
    return rc;
}

static void passed_print(const struct run_job *j, int prompt) {
    const int passed = sample_check_passed(&j->check, prompt), n = j->check.n_samples;
    if (passed > 0)
        log_info("prompt %d: %d of %d samples passed check '%s'", prompt + 1, passed, n,
                 check_kind(j->check.check));
    else
        log_warn("prompt %d: none of %d samples passed check '%s'; the answer is the most frequent "
                 "one",
                 prompt + 1, n, check_kind(j->check.check));
}

static int job_check(struct run_job *j, struct setup *s, struct error *err) {
    char **texts = xcalloc((size_t)MAX(j->n, 1), sizeof *texts);
    if (!j->o->check) return free(texts), OK;
    for (int i = 0; i < j->n; i++) {
        struct buf text = {0};
        answer_text(s->m, &j->reqs[i], &text);
        texts[i] = text.data;
    }
    int rc = sample_check_run(&j->check, s, texts, err);
    for (int i = 0; rc == OK && i < j->prompts.n; i++) passed_print(j, i);
    for (int i = 0; i < j->n; i++) free(texts[i]);
    free(texts);
    return rc;
}

static int job_run(struct run_job *j, struct setup *s, struct error *err) {
    int rc = job_encode(j, s->m, err);
    if (rc == OK) rc = adapter_mix_open(&j->mix, setup_load_adapter, s, err);
    if (rc != OK) return rc;
    job_requests_init(j, s->engine.max_len);
    rc = setup_engine(s, err);
    if (rc == OK) rc = session_load(j, s, err);
    if (rc == OK) rc = engine_run(s->e, j->reqs, j->n, NULL, err);
    if (rc == OK) rc = job_check(j, s, err);
    if (rc == OK) rc = job_print(j, s, err);
    return rc == OK ? session_save(j, s, err) : rc;
}

static void job_release(struct run_job *j) {
    grammar_free(j->grammar);
    sample_check_release(&j->check);
    for (int i = 0; j->reqs && i < j->n; i++) engine_request_release(&j->reqs[i]);
    for (int i = 0; j->tokens && i < j->prompts.n; i++) token_ids_release(&j->tokens[i]);
    for (int i = 0; j->choice_ids && i < j->o->choices.n; i++) token_ids_release(&j->choice_ids[i]);
    prompts_release(&j->prompts);
    adapter_mix_release(&j->mix);
    free(j->reqs);
    free(j->tokens);
    free(j->choice_ids);
    free(j->choice);
    free(j->bias);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct run_job j = {.c = c, .o = o, .message = args->n > 1 ? args->v[1] : NULL};
    struct setup s = {0};
    int rc = job_read(&j, err);
    if (rc == OK) {
        struct setup_needs w = job_needs(&j);
        rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
        if (rc == OK && s.m) rc = job_run(&j, &s, err);
        rc = setup_close(&s, rc, err); // the engine releases the requests
    }
    job_release(&j);
    return rc;
}

const struct cli_command cmd_run = {
    .name = "run",
    .args = "MODEL [MESSAGE]",
    .summary = "generate text, or choose with exact probabilities",
    .about = "Answers a chat message, continues a prompt, or chooses among given answers. All\n"
             "prompts and samples are computed in one batch. A model without a chat template\n"
             "continues MESSAGE.\n"
             "\n"
             "  shoal run models/fry 'sort: k b x' --temperature 0\n"
             "  shoal run models/fry '412と907、大きいのは？' --temperature 0\n"
             "  shoal run model.gguf -p 'Once upon a time' --max-tokens 100 --adapter "
             "runs/ID/adapters/gen_0/critic\n"
             "  shoal run models/fry -p 'yes or' --choices ' no' ' yes'\n"
             "  shoal run models/fry --file questions.jsonl --samples 4 --json --logprobs 3\n"
             "  shoal run models/fry '7325 + 6 = ?' --samples 8 --check calculator\n"
             "  shoal run model.gguf -p '春は' --adapter critic=0.7,explorer=0.3 --stop '。'\n"
             "  shoal run model.gguf -p 'Once' --max-memory 300M --kv-cache-dtype i8 --record",
    .main_options = "p chat system adapter choices max-tokens temperature top-p seed file samples "
                    "check json-schema "
                    "regex grammar session max-memory dry-run record",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run,
};
