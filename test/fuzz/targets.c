/*
 * targets: one row for every parser of external bytes, with the properties that must hold.
 *
 * A target is a function of (bytes, size) that may refuse its input with an error but may neither
 * crash, leak, nor break a contract; if a parser has a stronger property (an accepted value can be
 * used, decoded bytes encode to the input, a saved value loads as the same), the target checks it.
 * test/fuzz/fuzzer.c, which searches for inputs, includes this file, and test/test_fuzz.c, which
 * runs the inputs in test/fuzz/corpus/NAME/.
 *
 * To add a parser: write a function here, add a row to fuzz_targets, and put at least one valid and
 * one invalid input into test/fuzz/corpus/NAME/ (test/fuzz/dict/NAME.dict may list its words).
 *
 * Parsers that open paths get a file in a folder of this process, in memory if the machine has such
 * a file system. Formats of several files are one input: lines of "====" separate the parts.
 */
#ifndef SHOAL_TEST_FUZZ_TARGETS_C
#define SHOAL_TEST_FUZZ_TARGETS_C

#include "agent/agent.h"
#include "backup/internal.h"
#include "cluster/bus_frame.h"
#include "cluster/pbft_client.h"
#include "cluster/unit.h"
#include "cluster/wire.h"
#include "eval/eval.h"
#include "evolve/evolve.h"
#include "grade/grade.h"
#include "grammar/grammar.h"
#include "http/http.h"
#include "hub/internal.h"
#include "mcp/internal.h"
#include "memory/internal.h"
#include "model/internal.h"
#include "swarm/swarm.h"
#include "template/template.h"
#include "tokenizer/internal.h"
#include "train/train.h"
#include "world/world.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unistr.h>

/* Other headers here declare the same names. */
#define outcome life_outcome
#define ask life_ask
#undef outcome
#undef ask
#define call serve_call
#define answer serve_answer
#include "api/go_template.h"
#include "api/internal.h"
#include "api/ollama.h"
#include "jobs/jobs.h"
#include "ops/ops.h"
#include "scaling/scaling.h"
#include "serve/fallback.h"
#include "serve/generation.h"
#include "serve/request_fields.h"
#undef call
#undef answer

struct fuzz_target {
    const char *name;
    void (*run)(const uint8_t *data, size_t size);
};

/* Fails in every build, with the place. */
#define MUST(cond) CHECK(cond)

struct part {
    const uint8_t *data;
    size_t size;
};

static char fuzz_dir[256];

static void dir_clean(void) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_dir);
    if (system(command) != 0) fprintf(stderr, "cannot remove '%s'\n", fuzz_dir);
}

/* fuzz_dir/NAME; valid until the second next call. */
static const char *fuzz_path(const char *name) {
    static char paths[4][400];
    static int turn;
    if (!fuzz_dir[0]) {
        const char *given = getenv("FUZZ_DIR"); /* of the caller, which removes it after a crash */
        bool memory = access("/dev/shm", W_OK | X_OK) == 0;
        snprintf(fuzz_dir, sizeof fuzz_dir, "%s/shoal-fuzz-XXXXXX",
                 given    ? given
                 : memory ? "/dev/shm"
                          : "/tmp");
        MUST(mkdtemp(fuzz_dir) != NULL);
        atexit(dir_clean);
    }
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", fuzz_dir, name);
    return path;
}

static const char *part_put(const char *name, struct part p) {
    const char *path = fuzz_path(name);
    FILE *f = fopen(path, "wb");
    MUST(f != NULL);
    MUST(p.size == 0 || fwrite(p.data, 1, p.size, f) == p.size);
    MUST(fclose(f) == 0);
    return path;
}

/* The whole input as one file. */
static const char *input_put(const uint8_t *data, size_t size) {
    return part_put("input", (struct part){data, size});
}

/* Splits at lines of "===="; the last part takes the rest. Returns the number of parts. */
static int parts_cut(const uint8_t *data, size_t size, struct part *out, int max) {
    static const char mark[] = "\n====\n";
    size_t len = sizeof mark - 1;
    int n = 0;
    while (n < max - 1) {
        const uint8_t *at = size ? memmem(data, size, mark, len) : NULL;
        if (!at) break;
        out[n++] = (struct part){data, (size_t)(at - data)};
        size -= (size_t)(at - data) + len;
        data = at + len;
    }
    out[n++] = (struct part){data, size};
    return n;
}

/* Makes the folder `dir` contain exactly the parts, under these names (an empty part: no file). */
static const char *parts_put(const char *dir, const char *const *names, int max,
                             const uint8_t *data, size_t size) {
    struct part parts[8];
    struct error err;
    char name[96];
    int n = parts_cut(data, size, parts, max);
    MUST(dir_make(fuzz_path(dir), &err) == OK);
    for (int i = 0; i < max; i++) {
        snprintf(name, sizeof name, "%s/%s", dir, names[i]);
        if (i < n && parts[i].size > 0)
            part_put(name, parts[i]);
        else
            unlink(fuzz_path(name));
    }
    return fuzz_path(dir);
}

/* An accepted tokenizer encodes text of several scripts, and bytes that are not text, to ids of its
 * vocabulary. */
static void tokenizer_use(const struct tokenizer *t) {
    static const char text[] = "Hello  world 123'll\n\t日本語のテキスト、漢字。中文标点 emoji 🐟 "
                               "<s></s><|im_start|>a\xFF\xC3\xE3\x81 end";
    struct token_ids ids = {0};
    struct buf back = {0};
    tokenizer_encode(t, text, sizeof text - 1, TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, &ids);
    for (int i = 0; i < ids.n; i++) MUST(ids.v[i] >= 0 && ids.v[i] < tokenizer_vocab_size(t));
    tokenizer_decode(t, ids.v, ids.n, true, &back);
    MUST(tokenizer_bos(t) < tokenizer_vocab_size(t) && tokenizer_eos(t) < tokenizer_vocab_size(t));
    token_ids_release(&ids);
    buf_release(&back);
}

static void tokenizer_done(struct tokenizer *t) {
    if (t) tokenizer_use(t);
    tokenizer_free(t);
}

/* One token through the whole model: invalid shapes would read out of bounds here. */
static void model_use(struct model *m) {
    struct error err;
    struct forward_options o = {.max_rows = 1, .n_slots = 1, .slot_len = 1};
    struct batch_row row = {0};
    int32_t last = 0;
    if (m->tok) tokenizer_use(m->tok);
    MUST(model_hash(m, &err) != NULL);
    struct forward *f = forward_new(m, &o);
    float *logits = xcalloc((size_t)m->config.vocab_size, sizeof *logits);
    forward_run(f, &row, 1, &(struct lora_segment){.end = 1}, 1, &last, 1, logits);
    free(logits);
    forward_free(f);
}

static void model_done(struct model *m) {
    if (m) model_use(m);
    model_close(m);
}

static void fuzz_gguf(const uint8_t *data, size_t size) {
    struct error err;
    const char *path = input_put(data, size);
    model_done(model_open(path, NUMERIC_EXACT, &err));
    model_done(model_open(path, NUMERIC_FAST, &err));
}

static void fuzz_gguf_tokenizer(const uint8_t *data, size_t size) {
    struct error err;
    tokenizer_done(gguf_tokenizer_open(input_put(data, size), &err));
}

static void fuzz_safetensors(const uint8_t *data, size_t size) {
    struct error err;
    struct safetensors st;
    if (safetensors_open(&st, input_put(data, size), &err) != OK) return;
    char hash[HASH_LEN]; /* reads every byte */
    for (int i = 0; i < st.n_tensors; i++) {
        sha256_bytes(st.tensors[i].data, st.tensors[i].size, hash);
        MUST(safetensors_find(&st, st.tensors[i].name) == &st.tensors[i]);
    }
    safetensors_close(&st);
}

static void fuzz_hf(const uint8_t *data, size_t size) {
    static const char *const names[] = {"config.json", "model.safetensors.index.json",
                                        "tokenizer.json", "tokenizer_config.json",
                                        "model.safetensors"};
    struct error err;
    const char *dir = parts_put("hf", names, ARRAY_LEN(names), data, size);
    model_done(model_open(dir, NUMERIC_EXACT, &err));
}

static void fuzz_tokenizer_json(const uint8_t *data, size_t size) {
    struct error err;
    tokenizer_done(tokenizer_from_json(input_put(data, size), &err));
}

static void fuzz_sentencepiece(const uint8_t *data, size_t size) {
    struct error err;
    tokenizer_done(tokenizer_from_sentencepiece(input_put(data, size), &err));
}

/* The tokenizer first, because the weights are binary to the end. */
static void fuzz_llama2c(const uint8_t *data, size_t size) {
    static const char *const names[] = {"tokenizer.bin", "model.bin"};
    struct error err;
    parts_put("llama2c", names, ARRAY_LEN(names), data, size);
    model_done(llama2c_open(fuzz_path("llama2c/model.bin"), fuzz_path("llama2c/tokenizer.bin"),
                            NUMERIC_EXACT, &err));
}

/* Byte-level BPE decodes to the encoded text, for any bytes. */
static void fuzz_text(const uint8_t *data, size_t size) {
    static const char corpus[] = "the cat and the dog, 今日は今日、明日は明日。我们的我们 the the";
    static struct tokenizer *t;
    const char *text = (const char *)data;
    struct error err;
    struct token_ids ids = {0};
    struct buf back = {0};
    if (!t) t = tokenizer_train_bpe(corpus, sizeof corpus - 1, 270, "qwen2", NULL, 0, 0, &err);
    MUST(t != NULL);
    tokenizer_encode(t, text, size, 0, &ids);
    tokenizer_decode(t, ids.v, ids.n, true, &back);
    MUST(back.len == size && (size == 0 || memcmp(back.data, text, size) == 0));
    token_ids_release(&ids);
    buf_release(&back);
}

static void fuzz_json(const uint8_t *data, size_t size) {
    struct error err;
    json_t *v = json_parse((const char *)data, size, "input", &err);
    if (!v) return;
    char *text = json_canonical(v);
    json_t *again = json_parse(text, strlen(text), "its own text", &err);
    char *second = again ? json_canonical(again) : NULL;
    MUST(second && strcmp(text, second) == 0);
    free(text);
    free(second);
    json_decref(v);
    json_decref(again);
}

/* An accepted question has a correct choice, or a text for a grader. */
static void bank_use(struct eval_task *b) {
    for (int64_t i = 0; i < b->n_questions; i++) {
        const struct eval_question *q = &b->questions[i];
        MUST(q->n ? q->n >= 2 && q->correct >= 0 && q->correct < q->n : q->answer != NULL);
        MUST(q->contexts[0] || q->context);
        MUST(b->subjects[q->subject].preamble != NULL);
    }
    struct task_item *items = eval_task_items(b);
    for (int64_t i = 0; i < b->n_questions; i++) {
        MUST(*items[i].question && items[i].n_choices == b->questions[i].n);
        MUST(items[i].n_choices ? items[i].choices[items[i].correct] != NULL
                                : items[i].gold != NULL);
    }
    task_items_release(items, b->n_questions);
}

/* Every task is tried with every file. */
static void fuzz_questions(const uint8_t *data, size_t size) {
    const char *name, *about;
    struct error err;
    char file[64];
    for (int i = 0; (name = eval_task_builtin(i, &about)) != NULL; i++) {
        struct eval_task b;
        snprintf(file, sizeof file, "%s.jsonl", name);
        const char *path = part_put(file, (struct part){data, size});
        if (eval_task_open(&b, name, &(struct eval_task_options){.dir = fuzz_dir}, &err) == OK)
            bank_use(&b);
        eval_task_release(&b);
        unlink(path);
    }
}

static int line_ignore(void *ctx, const json_t *row, int line, struct error *err) {
    (void)ctx, (void)line, (void)err;
    MUST(json_object_size(row) == 3);
    return OK;
}

static void fuzz_csv(const uint8_t *data, size_t size) {
    struct error err;
    csv_each(input_put(data, size), line_ignore, NULL, &err);
}

static void fuzz_task_recipe(const uint8_t *data, size_t size) {
    static const char *const names[] = {"task.yaml", "items.jsonl"};
    char *path = path_join(parts_put("task", names, 2, data, size), names[0]);
    struct error err;
    struct eval_task b;
    struct eval_task_options o = {.shots = 1};
    if (eval_task_open(&b, path, &o, &err) == OK) bank_use(&b);
    eval_task_release(&b);
    free(path);
}

static void fuzz_yaml(const uint8_t *data, size_t size) {
    struct error err;
    struct yaml y;
    if (yaml_load(&y, input_put(data, size), &err) != OK) return;
    free(json_canonical(y.root));
    yaml_release(&y);
}

static void fuzz_recipe(const uint8_t *data, size_t size) {
    struct error err;
    struct evolve_recipe o;
    int rc = evolve_recipe_load(&o, input_put(data, size), &err);
    MUST(rc != OK || (o.personas.n >= 2 && o.tasks.n >= 1));
    evolve_recipe_release(&o);
}

/* A table or a text after "csv:", "tsv:" or "txt:", else JSON. */
static const char *training_file_put(const uint8_t *data, size_t size) {
    static const char *const kinds[][2] = {
        {"csv:", "input.csv"}, {"tsv:", "input.tsv"}, {"txt:", "input.txt"}};
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (size > 4 && memcmp(data, kinds[i][0], 4) == 0)
            return part_put(kinds[i][1], (struct part){data + 4, MIN(size - 4, (size_t)1 << 18)});
    return input_put(data, size);
}

static void fuzz_training_data(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    struct error err;
    struct dataset d;
    if (!t) t = tokenizer_new_bytes(259);
    struct lint l;
    struct buf text = {0};
    if (dataset_load(&d, training_file_put(data, size), NULL, t, 64, &err) != OK) return;
    MUST(lint_dataset(&d, &d, &l, &err) == OK);
    MUST(l.kept == d.n && l.kept + l.dropped == l.read && l.eval_samples.n == l.read);
    train_sample_render(&d.v[0], t, "[", "]", &text);
    json_t *clean = json_string(text.data);
    MUST(clean != NULL);
    json_decref(clean);
    buf_release(&text);
    MUST(d.n > 0 && d.targets > 0 && d.targets <= d.tokens);
    for (int i = 0; i < d.n; i++) MUST(d.v[i].n >= 2 && d.v[i].n <= 64);
    dataset_release(&d);
}

/* Training accepts every line of an answer that the filters keep. */
static void synth_lines_use(struct synth *s, const struct tokenizer *t) {
    struct error err;
    struct buf lines = {0};
    struct dataset d;
    int kept = synth_count_kept(s);
    MUST(synth_format_jsonl(s, &lines, &err) == OK);
    const char *path = input_put((const uint8_t *)lines.data, lines.len);
    if (kept) {
        MUST(dataset_load(&d, path, NULL, t, 0, &err) == OK && d.n == kept);
        dataset_release(&d);
    }
    buf_release(&lines);
}

/* Prompts, then one answer, which is used for each. */
static void fuzz_synth(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    static char require[] = "(a|b)*c?", language[] = "ja", template[] = "{topic}?",
                answer[] = "answer:";
    static char *patterns[] = {require};
    struct model model = {.name = require};
    struct synth_options o = {.require = {patterns, 1},
                              .language = language,
                              .language_share = 0.5,
                              .max_chars = 200,
                              .template = template,
                              .answer = answer};
    struct synth s = {.o = &o, .model = &model};
    struct error err;
    struct part parts[2] = {{0}};
    if (!t) t = tokenizer_new_bytes(259);
    parts_cut(data, size, parts, 2);
    const char *path = part_put("prompts", parts[0]);
    bool good = synth_prompts_read(&s.prompts, path, &o, &err) == OK ||
                synth_topics_read(&s.prompts, path, &o, &err) == OK;
    s.n = good ? MIN(s.prompts.n, 64) : 0;
    s.v = xcalloc((size_t)MAX(s.n, 1), sizeof *s.v);
    for (int i = 0; i < s.n; i++) {
        s.v[i] = (struct synth_sample){.prompt = i, .finish = FINISH_STOP};
        buf_add(&s.v[i].text, parts[1].data, parts[1].size);
        buf_puts(&s.v[i].text, "");
    }
    struct synth_filter_set *r = synth_filter_set_new(&o, NULL, &err);
    MUST(r != NULL && synth_filter(&s, r, &err) == OK);
    synth_filter_set_free(r);
    synth_lines_use(&s, t);
    synth_release(&s);
}

/* The smallest shape that has layers and shared kv heads. */
static struct model_config shape_small(void) {
    return (struct model_config){.arch = arch_find("llama"),
                                 .n_layers = 2,
                                 .d_model = 4,
                                 .n_heads = 2,
                                 .n_kv_heads = 1,
                                 .head_dim = 2,
                                 .d_ff = 4,
                                 .vocab_size = 4,
                                 .max_seq_len = 8,
                                 .rope_theta = 1e4f,
                                 .rms_norm_eps = 1e-5f,
                                 .tied = true};
}

/* An adapter that loads can be saved, and the saved one equals it. */
static void fuzz_peft(const uint8_t *data, size_t size) {
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors",
                                        "training_data.hashes"};
    struct error err;
    struct model_config shape = shape_small();
    const char *dir = parts_put("peft", names, ARRAY_LEN(names), data, size);
    struct adapter *a = adapter_load(dir, &shape, &err);
    if (!a) return;
    MUST(adapter_save(a, fuzz_path("saved"), "base", &err) == OK);
    struct adapter *b = adapter_load(fuzz_path("saved"), &shape, &err);
    MUST(b && strcmp(a->hash, b->hash) == 0 && !a->training_data == !b->training_data);
    adapter_release(a);
    adapter_release(b);
}

static struct trainer *trainer_small(void) {
    struct error err;
    struct train_options o;
    struct model_config shape = shape_small();
    struct adapter_config c = {.r = 1, .alpha = 2, .target = {[PROJ_Q] = true}};
    options_default(train_option_rows, &o);
    struct model *m = model_new_random(&shape, 1, NUMERIC_EXACT); /* never freed */
    struct adapter *a = adapter_new(&shape, &c, 1);
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, NULL, &err);
    MUST(t != NULL);
    adapter_release(a);
    options_release(train_option_rows, &o);
    return t;
}

/* The checksum of the input is corrected, otherwise the code behind the check would never run. */
static void fuzz_checkpoint(const uint8_t *data, size_t size) {
    static struct trainer *t;
    struct error err;
    char hash[HASH_LEN];
    struct buf file = {0};
    json_t *extra = NULL;
    if (!t) t = trainer_small();
    buf_add(&file, data, size);
    sha256_bytes(data, size, hash);
    buf_add(&file, hash, HASH_LEN - 1);
    if (trainer_load(t, input_put((const uint8_t *)file.data, file.len), &extra, &err) == OK)
        MUST(trainer_save(t, fuzz_path("checkpoint"), extra, &err) == OK);
    json_decref(extra);
    buf_release(&file);
}

static struct model_config shape_untied(void) {
    struct model_config shape = shape_small();
    shape.tied = false;
    return shape;
}

/* An adapter read from GGUF can be written as GGUF: the same adapter, or with its scales folded
 * into B the same map. */
static void gguf_lora_again(const struct adapter *a, const struct model_config *shape) {
    struct error err;
    const char *path = fuzz_path("saved.gguf");
    bool same = adapter_save_gguf(a, path, "base", false, &err) == OK;
    if (!same) MUST(adapter_save_gguf(a, path, "base", true, &err) == OK);
    struct adapter *b = adapter_load_gguf(path, shape, &err);
    MUST(b || (!same && err.code == ERR_NUMERIC)); /* folding may overflow floats */
    MUST(!same || strcmp(a->hash, b->hash) == 0);
    adapter_release(b);
}

static void fuzz_gguf_lora(const uint8_t *data, size_t size) {
    static struct model *m;
    struct error err;
    struct model_config shape = shape_untied();
    const char *path = input_put(data, size);
    struct adapter *a = adapter_load_gguf(path, &shape, &err);
    if (a) gguf_lora_again(a, &shape);
    adapter_release(a);
    if (!m) m = model_new_random(&shape, 1, NUMERIC_EXACT); /* never freed */
    a = adapter_open(path, m, &err);
    if (a) MUST(adapter_is_ready(a) && adapter_pack(a, DTYPE_F32));
    adapter_release(a);
}

/* A normalizer (tokenizer.json's JSON, or else SentencePiece's table), and a text for it. */
static void fuzz_tok_norm(const uint8_t *data, size_t size) {
    struct error err;
    struct part p[2] = {{0}};
    struct buf out = {0}, scratch = {0};
    parts_cut(data, size, p, 2);
    bool json = p[0].size > 0 && p[0].data[0] == '{';
    char *text = json ? strndup((const char *)p[0].data, p[0].size)
                      : normalizer_from_sentencepiece(p[0].data, p[0].size, true);
    struct normalizer *n = normalizer_new(text, &err);
    if (n) {
        normalizer_apply(n, p[1].size ? (const char *)p[1].data : "", p[1].size, &out, &scratch);
        MUST(out.len <=
             4096 * (p[1].size + 1)); /* a larger output violates the limit of normalizer_new */
    }
    normalizer_free(n);
    free(text);
    buf_release(&out);
    buf_release(&scratch);
}

/* The input is a template; the conversation has several scripts, tool calls and an empty text. */
static const json_t *conversation(void) {
    static const char text[] =
        "{\"messages\": [{\"role\": \"system\", \"content\": \"簡潔に。<|im_end|>\"}, {\"role\": "
        "\"user\", \"content\": \"  天気は？ 你好\\n\"}, {\"role\": \"assistant\", \"content\": "
        "\"\", \"tool_calls\": [{\"type\": \"function\", \"function\": {\"name\": \"weather\", "
        "\"arguments\": {\"place\": \"東京\", \"days\": 2, \"exact\": 0.5, \"x\": null}}}]}, "
        "{\"role\": \"tool\", \"content\": \"晴れ\"}, {\"role\": \"assistant\", \"content\": "
        "\"<think>\\nwell\\n</think>\\n\\n晴れです。\"}, {\"role\": \"user\", \"content\": "
        "[{\"type\": \"text\", \"text\": \"\"}]}], \"add_generation_prompt\": true, \"tools\": "
        "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": "
        "{\"type\": \"object\", \"required\": [\"place\"]}}}], \"bos_token\": \"<s>\", "
        "\"eos_token\": \"</s>\"}";
    static json_t *vars;
    struct error err;
    if (!vars) vars = json_parse(text, sizeof text - 1, "conversation", &err);
    MUST(vars != NULL);
    return vars;
}

static void jinja_output_use(const struct jinja_output *out) {
    size_t data = 0;
    MUST(out->text[out->n] == '\0' && out->n <= (size_t)256 << 20);
    for (size_t i = 0; i < out->n; i++) data += (out->origins[i] & JINJA_DATA) != 0;
    MUST(data <= out->n && (out->n == 0 || out->n_message_ranges > 0));
    for (size_t i = 0; i < out->n_message_ranges; i++) {
        MUST(out->message_ranges[i].begin <= out->n && out->message_ranges[i].message < 6);
        MUST(i == 0 ? out->message_ranges[i].begin == 0
                    : out->message_ranges[i].begin >= out->message_ranges[i - 1].begin);
    }
}

/* The budget has few steps left, so that work which is not counted shows as a timeout. */
enum { FUZZ_STEPS = 1000000, FUZZ_POLLS = 16 };

static bool polls_are_over(void *ctx) {
    int *polls = ctx;
    return ++*polls > FUZZ_POLLS;
}

static void fuzz_jinja(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    struct error err;
    struct jinja_output out = {0};
    int polls = 0;
    struct jinja_input in = {
        .vars = conversation(), .now = 1700000000, .steps_used = JINJA_MAX_STEPS - FUZZ_STEPS};
    struct chat_template_input chat = {.messages = json_object_get(in.vars, "messages"),
                                       .stop = polls_are_over,
                                       .stop_ctx = &polls};
    struct jinja *j = jinja_parse((const char *)data, size, &err);
    if (!j) return;
    if (jinja_render(j, &in, &out, &err) == OK) {
        jinja_output_use(&out);
        MUST(out.steps < FUZZ_STEPS && out.bytes <= JINJA_MAX_BYTES);
    }
    jinja_output_release(&out);
    jinja_free(j);
    if (!t) t = tokenizer_new_bytes(259);
    char *text = strndup((const char *)data, size);
    struct token_ids ids = {0};
    struct buf mask = {0};
    tokenizer_set_chat_template(t, text);
    if (chat_template_encode(t, &chat, &ids, &mask, &err) == OK) MUST((size_t)ids.n == mask.len);
    tokenizer_set_chat_template(t, NULL);
    free(text);
    token_ids_release(&ids);
    buf_release(&mask);
}

/* An accepted Go template becomes a Jinja template that renders within the usual limits. */
static void fuzz_go_template(const uint8_t *data, size_t size) {
    struct error err;
    struct buf b = {0};
    struct jinja_output out = {0};
    char *text = strndup((const char *)data, size);
    if (go_template_jinja(text, size % 2, &b, &err) == OK && !u8_check(data, strlen(text))) {
        json_t *messages = json_object_get(conversation(), "messages");
        json_t *vars = go_template_variables(messages);
        struct jinja *j = jinja_parse(b.data ? b.data : "", b.len, &err);
        if (!j) fprintf(stderr, "%s: %s\n", b.data, err.text);
        MUST(j != NULL);
        MUST(json_array_size(json_object_get(vars, "turns")) > 0);
        json_object_set(vars, "messages", messages);
        struct jinja_input in = {
            .vars = vars, .now = -1, .steps_used = JINJA_MAX_STEPS - FUZZ_STEPS};
        int rc = jinja_render(j, &in, &out, &err);
        MUST(rc == OK || strstr(err.text, "too many steps") || strstr(err.text, "MiB of memory") ||
             strstr(err.text, "nested too deeply") || strstr(err.text, "writes more than"));
        jinja_output_release(&out);
        jinja_free(j);
        json_decref(vars);
    }
    buf_release(&b);
    free(text);
}

static void modelfile_use(const json_t *v) {
    static const char *const texts[] = {"from", "template", "system", "license"};
    const json_t *p = json_object_get(v, "parameters"), *each;
    const char *key;
    size_t i;
    for (i = 0; i < ARRAY_LEN(texts); i++) {
        const json_t *text = json_object_get(v, texts[i]);
        MUST(!text || json_is_string(text));
    }
    json_array_foreach (json_object_get(v, "adapters"), i, each) MUST(json_is_string(each));
    json_array_foreach (json_object_get(v, "messages"), i, each)
        MUST(json_is_string(json_object_get(each, "role")) &&
             json_is_string(json_object_get(each, "content")));
    json_object_foreach ((json_t *)(uintptr_t)p, key, each)
        MUST(strcmp(key, "stop") == 0
                 ? json_is_array(each)
                 : json_is_string(each) || json_is_number(each) || json_is_boolean(each));
}

static void fuzz_modelfile(const uint8_t *data, size_t size) {
    struct error err;
    json_t *v = json_object();
    char *text = strndup((const char *)data, size);
    if (ollama_modelfile(text, v, &err) == OK) modelfile_use(v);
    json_decref(v);
    free(text);
}

/* Every byte, and a few longer tokens, some of which end inside a character. */
enum { BYTE_TOKENS = 256, GRAMMAR_TOKENS = BYTE_TOKENS + 8 };
static const struct grammar_vocab *grammar_vocab_small(void) {
    static const char *const more[] = {"ab",   "\": ",     "日本", "日\xE6",
                                       "true", "\x9C\xAC", "}}",   "0"};
    static struct grammar_vocab *v;
    static char bytes[BYTE_TOKENS];
    const char *pieces[GRAMMAR_TOKENS];
    int32_t lens[GRAMMAR_TOKENS];
    if (v) return v;
    for (int i = 0; i < GRAMMAR_TOKENS; i++) {
        if (i < BYTE_TOKENS) bytes[i] = (char)i;
        pieces[i] = i < BYTE_TOKENS ? &bytes[i] : more[i - BYTE_TOKENS];
        lens[i] = i < BYTE_TOKENS ? 1 : (int32_t)strlen(pieces[i]);
    }
    return v = grammar_vocab_new_pieces(pieces, lens, GRAMMAR_TOKENS);
}

/* The mask equals the result of accepting, token by token; but limits may end one of them
 * earlier. */
static void grammar_mask_check(const struct grammar_state *s) {
    uint32_t bits[(GRAMMAR_TOKENS + 31) / 32];
    struct grammar_state c = grammar_state_copy(s);
    grammar_mask(&c, -1, bits);
    for (int32_t i = 0; i < GRAMMAR_TOKENS; i++) {
        struct grammar_state next = grammar_state_copy(s);
        bool allowed = bits[i / 32] >> i % 32 & 1;
        MUST(grammar_accept_token(&next, i) == allowed || grammar_machine_hit_limit(s->machine));
        grammar_state_release(&next);
    }
    grammar_state_release(&c);
}

/* A reply that follows the masks within the remaining bytes ends as a complete text. */
static void grammar_finish(struct grammar_state *s) {
    uint32_t bits[(GRAMMAR_TOKENS + 31) / 32];
    int32_t left = grammar_min_remaining(s);
    if (left > 1 << 28) return; /* too long to be counted exactly */
    for (int turns = 0; turns < 16 && !grammar_is_final(s); turns++) {
        int32_t token = GRAMMAR_TOKENS - 1;
        grammar_mask(s, --left, bits);
        while (token >= 0 && !(bits[token / 32] >> token % 32 & 1)) token--;
        if (grammar_machine_hit_limit(s->machine)) return;
        MUST(token >= 0 && grammar_accept_token(s, token) && grammar_min_remaining(s) <= left);
    }
}

static void grammar_walk(const struct grammar *g, struct part text) {
    struct grammar_machine *m = grammar_machine_new(g, grammar_vocab_small(), 1 << 20);
    struct grammar_state s = grammar_state_new(m);
    struct buf forced = {0};
    MUST(grammar_machine_hit_limit(m) || grammar_min_remaining(&s) == grammar_min_length(g));
    for (size_t i = 0; i < MIN(text.size, (size_t)256); i++) {
        if (i == 0) grammar_mask_check(&s);
        if (!grammar_accept_bytes(&s, text.data + i, 1)) break;
        MUST(grammar_min_remaining(&s) >= 0 &&
             grammar_is_final(&s) == (grammar_min_remaining(&s) == 0));
    }
    grammar_mask_check(&s);
    grammar_jump_forward(&s, 64, &forced);
    MUST(grammar_accept_bytes(&s, forced.data, forced.len));
    grammar_finish(&s);
    grammar_state_release(&s);
    grammar_machine_free(m);
    buf_release(&forced);
}

/* The enumeration is in byte order, and the grammar accepts its texts. */
static void grammar_list(const struct grammar *g) {
    struct error err;
    struct strings texts = {0};
    struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
    int n = grammar_enumerate(g, 16, &texts, &err);
    MUST(n < 0 ? err.code == ERR_MEMORY : n == texts.n);
    for (int i = 0; i < texts.n; i++) {
        struct grammar_state s = grammar_state_new(m);
        MUST(i == 0 || strcmp(texts.v[i - 1], texts.v[i]) < 0);
        MUST(grammar_accept_bytes(&s, texts.v[i], strlen(texts.v[i])) && grammar_is_final(&s));
        grammar_state_release(&s);
    }
    grammar_machine_free(m);
    strings_release(&texts);
}

/* Takes ownership of the grammar, which may be NULL. */
static void grammar_use(struct grammar *g, struct part text) {
    if (g) grammar_walk(g, text);
    if (g) grammar_list(g);
    grammar_free(g);
}

/* The source of a grammar, and a text that it may accept. */
static void fuzz_regex(const uint8_t *data, size_t size) {
    struct error err;
    struct part p[2] = {{0}};
    parts_cut(data, size, p, 2);
    grammar_use(grammar_new_regex((const char *)p[0].data, p[0].size, &err), p[1]);
}

static void fuzz_gbnf(const uint8_t *data, size_t size) {
    struct error err;
    struct part p[2] = {{0}};
    parts_cut(data, size, p, 2);
    grammar_use(grammar_new_gbnf((const char *)p[0].data, p[0].size, &err), p[1]);
}

static void fuzz_json_schema(const uint8_t *data, size_t size) {
    struct error err;
    struct part p[2] = {{0}};
    parts_cut(data, size, p, 2);
    for (int compact = 0; compact < 2; compact++)
        grammar_use(grammar_new_json_schema((const char *)p[0].data, p[0].size, compact, &err),
                    p[1]);
}

/* A loaded session can be continued and saved. */
static void session_use(struct engine *e, int32_t n) {
    static const int32_t tokens[] = {1, 2, 3, 1, 2, 3};
    struct error err;
    struct token_seq seq = {tokens, ARRAY_LEN(tokens)};
    struct engine_request r = {.prompt = tokens, .n_prompt = seq.n, .max_tokens = 1};
    MUST(n >= 1 && n <= 8);
    MUST(engine_run(e, &r, 1, NULL, &err) == OK);
    MUST(r.n_out == 1 && r.out[0] >= 0 && r.out[0] < 4);
    MUST(engine_session_save(e, seq, NULL, "base", fuzz_path("session"), &err) == OK);
    MUST(engine_session_load(e, "base", fuzz_path("session"), &n, &err) == OK);
    engine_request_release(&r);
}

static struct engine *engine_small(enum dtype kv) {
    static struct model *m;
    struct error err;
    struct model_config shape = shape_small();
    struct engine_options o = {.max_rows = 4, .max_seqs = 2, .max_len = 8, .kv_elem = kv};
    if (!m) m = model_new_random(&shape, 1, NUMERIC_EXACT); /* never freed */
    struct engine *e = engine_new(m, &o, &err);
    MUST(e != NULL);
    return e;
}

/* As for a checkpoint, the checksum is corrected. */
static void fuzz_session(const uint8_t *data, size_t size) {
    static const enum dtype elems[] = {DTYPE_F32, DTYPE_I8};
    struct error err;
    char hash[HASH_LEN];
    struct buf file = {0};
    int32_t n;
    buf_add(&file, data, size);
    sha256_bytes(data, size, hash);
    buf_add(&file, hash, HASH_LEN - 1);
    for (size_t i = 0; i < ARRAY_LEN(elems); i++) {
        struct engine *e = engine_small(elems[i]);
        const char *path = input_put((const uint8_t *)file.data, file.len);
        if (engine_session_load(e, "base", path, &n, &err) == OK) session_use(e, n);
        engine_free(e);
    }
    buf_release(&file);
}

static bool ends_in(const char *text, const char *end) {
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}

/* A selected file stays inside its folder and is not a pickle. */
static void hub_listing_use(const struct hub_ref *name, struct part p) {
    struct error err;
    struct hub_repo r;
    struct strings all = {0};
    json_t *v = json_parse((const char *)p.data, p.size, "listing", &err);
    if (!v) return;
    strings_add(&all, "*");
    int rc = hub_repo_parse(v, &r, &err);
    json_decref(v);
    for (int turn = 0; rc == OK && turn < 2; turn++) {
        if (hub_repo_select(&r, name, turn ? &all : &(struct strings){0}, &err) != OK) continue;
        for (int i = 0; i < r.n; i++) {
            const struct hub_file *f = &r.files[i];
            MUST(!f->wanted || (hub_path_safe(f->path) && f->size >= 0));
            MUST(!f->wanted || !(ends_in(f->path, ".bin") || ends_in(f->path, ".pickle")));
        }
    }
    hub_repo_release(&r);
    strings_release(&all);
}

/* A record refers only to its own folder. */
static void hub_record_use(struct part p) {
    struct error err;
    const char *dir = fuzz_path("cache/hub/a/b");
    MUST(dir_make(dir, &err) == OK);
    part_put("cache/hub/a/b/.hub.json", p);
    setenv("SHOAL_CACHE", fuzz_path("cache"), 1);
    char *found = hub_cached_path("hf:a/b", &err);
    MUST(!found || strncmp(found, dir, strlen(dir)) == 0);
    free(found);
}

/* A name, the hub's list of its files, and the record of a pull. */
static void fuzz_hub(const uint8_t *data, size_t size) {
    struct error err;
    struct hub_ref name;
    struct part p[3] = {{0}};
    parts_cut(data, size, p, 3);
    char *text = strndup(p[0].size ? (const char *)p[0].data : "", p[0].size);
    if (hub_ref_parse(text, &name, &err) == OK) {
        MUST(strchr(name.repo, '/') && (!*name.file || hub_path_safe(name.file)));
        hub_listing_use(&name, p[1]);
    }
    hub_record_use(p[2]);
    free(text);
}

/* The manifest's hash is corrected, so that the fields are checked; accepted paths stay below their
 * roots. */
static void fuzz_backup_manifest(const uint8_t *data, size_t size) {
    static const char id[] = "20260101-000000-000";
    struct error err;
    char hash[HASH_LEN];
    json_t *v = json_parse((const char *)data, size, "manifest", &err), *f;
    if (!json_is_object(v)) {
        json_decref(v);
        return;
    }
    json_object_del(v, "hash");
    char *bare = json_canonical(v);
    sha256_bytes(bare, strlen(bare), hash);
    json_object_set_new(v, "hash", json_string(hash));
    char *text = json_canonical(v);
    MUST(dir_make(fuzz_path("backups"), &err) == OK);
    part_put("backups/20260101-000000-000.json",
             (struct part){(const uint8_t *)text, strlen(text)});
    json_t *read = backup_manifest_read(fuzz_path("backups"), id, &err);
    size_t i;
    json_array_foreach (json_object_get(read, "files"), i, f) {
        const char *path = json_get_string(f, "path");
        char *inside = xasprintf("/%s/", path);
        MUST(*path != '/' && !strstr(inside, "/../") && json_get_number(f, "mode") <= 0777);
        MUST(json_object_get(json_object_get(read, "roots"), json_get_string(f, "root")));
        free(inside);
    }
    json_decref(read);
    json_decref(v);
    free(bare);
    free(text);
}

/* Random answers, some of them none; the fifth step fails. */
static int workflow_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    static const char *const texts[] = {"answer: 12", "{\"vote\": \"海\"}", "結論: 空", ""};
    int *steps = ctx;
    if (++*steps == 5) return error_set(err, ERR_STATE, "the script ends here");
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        int of = c->reply == REPLY_JUDGE ? c->n_candidates : c->item->n_choices;
        MUST(c->max_tokens > 0 && c->n_messages >= 0);
        c->failed = (i + *steps) % 5 == 4 ? "no room" : NULL;
        c->text = c->failed ? NULL : xstrdup(texts[(i + *steps) % 4]);
        c->answer.choice = of ? (i + *steps) % of : -1;
        if (of) c->answer.prob[c->answer.choice] = 0.5f;
        c->n_generated = c->max_tokens;
    }
    return OK;
}

/* An accepted workflow runs, with and without choices; the team has every role, so that nodes are
 * executed and not only skipped. */
static void fuzz_workflow(const uint8_t *data, size_t size) {
    static char which[] = "which?", yes[] = "はい", no[] = "いいえ";
    struct task_item items[2] = {
        {.question = which, .choices = {yes, no}, .n_choices = 2, .lang = "ja"},
        {.question = which, .lang = "en"}};
    struct agent team[TEAM_MAX] = {{0}};
    struct transcript o[2] = {{0}};
    struct workflow_options options = {.temperature = -1};
    struct error err;
    int steps = 0;
    struct llm_client asker = {&steps, workflow_ask};
    struct workflow *w = workflow_parse((const char *)data, size, "input", &err);
    if (!w) return;
    for (int i = 0; i < TEAM_MAX; i++) team[i].name = i % 2 ? "ada" : "花";
    int rc = workflow_run(w, &asker, team, TEAM_MAX, items, 2, &options, o, NULL, &err);
    for (int i = 0; i < 2; i++) {
        MUST(o[i].n_candidates <= items[i].n_choices + o[i].n);
        MUST(o[i].answer < MAX(o[i].n_candidates, 1));
        for (int k = 0; k < o[i].n; k++) MUST(o[i].v[k].answer < o[i].n_candidates);
        MUST(rc != OK || o[i].rounds <= o[i].n);
        transcript_release(&o[i]);
    }
    workflow_free(w);
}

static struct adapter *team_adapter(void *ctx, const char *path, struct error *err) {
    static struct adapter some;
    MUST(*path && strcmp(path, "base") != 0);
    int *n = ctx;
    if (++*n % 8 == 0) error_set(err, ERR_FORMAT, "'%s' is none", path);
    return *n % 8 ? &some : NULL;
}

/* An accepted team can be loaded and run; its agents' names differ. */
static void team_use(struct team *t) {
    static char which[] = "which?", yes[] = "はい", no[] = "いいえ";
    const struct task_item it = {
        .question = which, .choices = {yes, no}, .n_choices = 2, .lang = "ja"};
    struct debate d;
    struct error err;
    int steps = 0, n = 0;
    const struct llm_client asker = {&steps, workflow_ask};
    MUST(t->n >= 1 && t->n <= TEAM_MAX && t->options.rounds >= 1 && t->options.vote);
    for (int i = 0; i < t->n; i++)
        for (int k = 0; k < i; k++) MUST(strcmp(t->v[i].name, t->v[k].name) != 0);
    if (team_load_adapters(t, team_adapter, &n, &err) != OK) return;
    for (int i = 0; i < t->n; i++)
        MUST(!t->v[i].mix == (t->v[i].n_mix == 0) && !(t->v[i].mix && t->v[i].adapter));
    debate_run(&asker, t->v, t->n, &it, 1, &t->options, &d, NULL, &err);
    debate_release(&d);
}

/* A team, then a protocol, an adapter and a router that it may name. */
static void fuzz_team(const uint8_t *data, size_t size) {
    static const char *const names[] = {"team.yaml", "own.yaml", "adapter", "router.json"};
    char *path = path_join(parts_put("team", names, ARRAY_LEN(names), data, size), names[0]);
    struct team t;
    struct error err;
    if (team_read(&t, path, &err) == OK) team_use(&t);
    team_release(&t);
    free(path);
}

/* The similarity of an accepted profile is a cosine. */
static void fuzz_prompt_profile(const uint8_t *data, size_t size) {
    struct prompt_profile p, prompt = {0};
    struct error err;
    if (prompt_profile_parse(&p, (const char *)data, size, "input", &err) != OK) return;
    prompt_profile_add(&prompt, "sort: k b x");
    double cosine = prompt_profile_similarity(&p, &prompt);
    MUST(p.n > 0 && cosine >= -1.0001 && cosine <= 1.0001);
}

/* Of an agent file that is accepted, the form is known and the limits are within their ranges. */
static void fuzz_agent(const uint8_t *data, size_t size) {
    struct agent_settings s;
    struct agent_options o = {0};
    struct adapter_mix mix;
    struct error err;
    if (agent_settings_read(&s, input_put(data, size), &err) != OK) return;
    MUST(agent_settings_apply(&s, &o, &err) == OK);
    MUST(o.max_steps >= 1 && o.max_steps <= 64 && o.max_tokens >= 1);
    adapter_mix_parse(&mix, s.adapter, &err);
    adapter_mix_release(&mix);
    options_release(agent_setting_rows, &s);
}

/* An accepted chain has links of one of the three kinds, with distinct names; only the last one is
 * a fixed reply. */
static void fuzz_fallback(const uint8_t *data, size_t size) {
    struct fallback_settings s;
    struct error err;
    if (fallback_settings_read(&s, input_put(data, size), &err) != OK) return;
    MUST(s.n >= 1 && s.n <= FALLBACK_MAX_LINKS && s.timeout > 0);
    for (int i = 0; i < s.n; i++) {
        const struct fallback_link_settings *l = &s.links[i];
        MUST(l->reply ? !l->model && !l->url && i + 1 == s.n : l->model && *l->model);
        MUST(l->url || !l->api_key_env);
        MUST(l->timeout > 0 && l->failure_threshold >= 1 && l->cooldown > 0);
        MUST(*l->name && strlen(l->name) <= FALLBACK_MAX_NAME);
        for (int k = 0; k < i; k++) MUST(strcmp(s.links[k].name, l->name) != 0);
    }
    fallback_settings_release(&s);
}

/* An answer equals itself, and scores are between 0 and 1. */
static void grade_use(const struct grader *g, const char *text, const char *gold) {
    struct error err;
    struct buf form = {0};
    bool found = grader_extract(g, text, &form);
    MUST(found == grader_equivalent(g, text, text));
    if (grader_check(g, gold, &err) == OK) {
        struct grade got = grader_grade(g, text, &gold, 1);
        MUST(got.found == found && got.score >= 0 && got.score <= (found ? 1 : 0));
    }
    if (grader_equivalent(g, text, gold)) MUST(found);
    buf_release(&form);
}

/* A text and a gold. */
static void fuzz_grade(const uint8_t *data, size_t size) {
    struct part p[2] = {{0}};
    size = MIN(size, 1 << 16); // answers are limited by the context; some graders take quadratic
                               // time
    parts_cut(data, size, p, 2);
    char *text = strndup(p[0].size ? (const char *)p[0].data : "", p[0].size);
    char *gold = strndup(p[1].size ? (const char *)p[1].data : "", p[1].size);
    for (int i = 0; grader_at(i); i++) grade_use(grader_at(i), text, gold);
    free(text);
    free(gold);
}

/* White space of any width. */
static size_t spaces_at(const char *p, size_t left) {
    static const char *const spaces[] = {"\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80",
                                         "\xE2\x80\xA8", "\xE2\x80\xA9", "\xE2\x80\xAF",
                                         "\xE2\x81\x9F", "\xE3\x80\x80"};
    bool quad = left >= 3 && memcmp(p, "\xE2\x80", 2) == 0 && (uint8_t)p[2] - 0x80u <= 10;
    if (left && (*p == ' ' || (*p >= '\t' && *p <= '\r'))) return 1;
    for (size_t i = 0; i < ARRAY_LEN(spaces); i++) {
        size_t n = strlen(spaces[i]);
        if (left >= n && memcmp(p, spaces[i], n) == 0) return n;
    }
    return quad ? 3 : 0;
}

/* Chunks are bounded, and only white space is between them. */
static void chunks_use(const struct buf *text, int chars) {
    struct text_chunk *v;
    size_t at = 0;
    int n = text_split_chunks(text->data, text->len, chars, &v);
    for (int i = 0; i <= n; i++) {
        size_t begin = i < n ? v[i].begin : text->len;
        MUST(begin >= at && begin <= text->len);
        for (size_t gap; at < begin; at += gap)
            MUST((gap = spaces_at(text->data + at, begin - at)) > 0);
        if (i == n) break;
        MUST(v[i].end > begin && v[i].end <= text->len);
        MUST(u8_mbsnlen((const uint8_t *)text->data + begin, v[i].end - begin) <= (size_t)chars);
        at = v[i].end;
    }
    free(v);
}

/* A page becomes UTF-8 text that is no longer than the page, and can be split and indexed. */
static void fuzz_document(const uint8_t *data, size_t size) {
    int (*const readers[])(const char *, size_t, struct buf *, struct buf *,
                           struct error *) = {document_read_html, document_read_markdown};
    for (size_t i = 0; i < ARRAY_LEN(readers); i++) {
        struct error err;
        struct buf title = {0}, text = {0}, terms = {0};
        struct query_term query[QUERY_TERMS];
        int64_t n;
        buf_puts(&text, "");
        if (readers[i]((const char *)data, size, &title, &text, &err) == OK) {
            MUST(title.len <= size && text.len <= size + 2);
            MUST(u8_check((const uint8_t *)text.data, text.len) == NULL);
            MUST(strlen(text.data) == text.len);
            chunks_use(&text, 16);
            chunks_use(&text, 100);
            MUST(terms_index(text.data, text.len, &terms, &n, &err) == OK);
            MUST(u8_check((const uint8_t *)terms.data, terms.len) == NULL);
            MUST(terms_query(text.data, query, &err) >= 0);
        }
        buf_release(&title);
        buf_release(&text);
        buf_release(&terms);
    }
}

/* A text of a model or a user: the cleaned answer is UTF-8 and no longer, and extracted facts can
 * be merged and are grounded in the text. */
static void fuzz_rules(const uint8_t *data, size_t size) {
    struct error err;
    size = MIN(size, 1 << 14); // the rules take 18 us a byte, ten times that when instrumented
    char *text = strndup((const char *)data, size);
    for (int cut = 0; cut < 2; cut++) {
        struct buf out = {0};
        bool good = answer_clean(text, cut, &out);
        MUST(good == (out.len > 0) && out.len <= size);
        MUST(!good || u8_check((const uint8_t *)out.data, out.len) == NULL);
        buf_release(&out);
    }
    struct conversation *c = conversation_open(NULL, "x", &err);
    json_t *facts = facts_extract(text), *kept = facts_filter_grounded(facts, text);
    int n;
    MUST(conversation_merge_facts(c, facts, &err) == OK &&
         conversation_merge_facts(c, kept, &err) == OK);
    MUST(conversation_remove_facts(c, NULL, &n, &err) == OK && n >= (int)json_object_size(facts));
    json_decref(facts);
    json_decref(kept);
    conversation_close(c);
    free(text);
}

/* The log of a blackboard, an array of events. A board that opens can be displayed and written, and
 * opens again as the same. */
static void board_use(struct store *s) {
    struct error err;
    struct blackboard_options o = {.store = s, .name = "log"};
    struct blackboard *b = blackboard_open(&o, &err);
    if (!b) return;
    const float v[2] = {1, 0};
    json_t *value = json_true(), *row = blackboard_write(b, "k", value, NULL, &err);
    MUST(row != NULL && json_is_true(blackboard_read(b, "k")));
    struct blackboard *again = blackboard_open(&o, &err);
    MUST(again != NULL);
    json_t *views[2] = {blackboard_debug_view(b), blackboard_debug_view(again)},
           *alike = blackboard_find_similar(b, NULL, v, 2, BOARD_SIMILARITY, 3);
    MUST(json_equal(views[0], views[1]) && json_array_size(alike) <= 3);
    json_decref(alike);
    json_decref(views[0]);
    json_decref(views[1]);
    json_decref(row);
    blackboard_close(again);
    blackboard_close(b);
}

static void fuzz_board(const uint8_t *data, size_t size) {
    struct error err;
    json_t *events = json_parse((const char *)data, size, "log", &err);
    struct store *s = json_is_array(events) ? store_open(":memory:", &err) : NULL;
    if (s && store_log_append(s, "log", 1, events, &err) == OK) board_use(s);
    store_close(s);
    json_decref(events);
}

/* Accepted rules can be simulated and rendered: no agent is in a wall, and items and energy are
 * conserved. */
static void world_use(const struct world_rules *r, uint64_t seed) {
    enum { AGENTS = 3, TICKS = 12 };
    static struct world w;
    struct buf text = {0};
    int16_t actions[AGENTS];
    world_reset(&w, r, AGENTS, seed);
    for (int t = 0; t < TICKS; t++) {
        world_policy_act(&world_policies[t % 3], &w, r, seed, actions);
        for (int i = 0; i < AGENTS; i++)
            actions[i] += (int16_t)(WORLD_N_ACTIONS * (t % (r->vocabulary + 1)));
        world_step(&w, r, actions);
        int64_t energy = w.energy_spent - w.energy_given;
        for (int i = 0; i < AGENTS; i++) {
            MUST(!(w.cells[w.agents[i].cell] & CELL_WALL));
            energy += w.agents[i].energy;
            world_prompt(&w, r, i, &text);
        }
        MUST(energy == 0 && w.food_eaten + w.food_lost <= w.food_grown);
    }
    buf_release(&text);
}

static void fuzz_world(const uint8_t *data, size_t size) {
    struct error err;
    struct world_rules r;
    if (world_rules_parse(&r, "input", (const char *)data, size, &err) == OK) world_use(&r, size);
    world_rules_release(&r);
}

/* An accepted trace can be read at any tick and is the same after JSON. */
static void fuzz_trace(const uint8_t *data, size_t size) {
    static struct world w, other;
    struct error err;
    struct trace t, back;
    w.n_agents = other.n_agents = 0;
    if (trace_parse(&t, "trace", (const char *)data, size, &err) == OK) {
        trace_seek(&t, &w, t.n_ticks);
        json_t *v = trace_json(&t, &w);
        MUST(trace_from_json(&back, v, &err) == OK && back.n_ticks == t.n_ticks);
        trace_seek(&back, &other, back.n_ticks);
        MUST(memcmp(&w, &other, sizeof w) == 0);
        trace_seek(&t, &w, t.n_ticks / 2);
        json_decref(v);
        trace_release(&back);
    }
    trace_release(&t);
}

/* Every line gets one line of JSON, and a world's state can be restored. Only the first lines are
 * sent: a reply takes 13 us here, and a megabyte can have a million lines. */
static void fuzz_world_pipe(const uint8_t *data, size_t size) {
    enum { MAX_LINES = 50000 };
    struct error err;
    int n_lines = 0;
    struct world_rules r;
    MUST(world_rules_load(&r, "repaired", &err) == OK);
    struct world_server *s = world_server_new(&r, 2, 40, &err);
    for (const char *at = (const char *)data, *end = at + size; s && at < end;) {
        if (n_lines++ == MAX_LINES) break;
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        struct buf out = {0};
        bool open = world_server_handle(s, at, (size_t)((stop ? stop : end) - at), &out);
        MUST(memchr(out.data, '\n', out.len) == out.data + out.len - 1);
        json_t *v = json_parse(out.data, out.len, "answer", &err);
        MUST(v != NULL);
        json_decref(v);
        buf_release(&out);
        at = stop && open ? stop + 1 : end;
    }
    struct buf out = {0};
    world_server_handle(s, "{\"state\":{}}", 12, &out);
    if (strncmp(out.data, "{\"state\":", 9) == 0) {
        struct buf again = {0};
        buf_printf(&again, "{\"restore\":%s", out.data + 9);
        out.len = 0;
        world_server_handle(s, again.data, again.len, &out);
        MUST(strncmp(out.data, "{\"observations\"", 15) == 0);
        buf_release(&again);
    }
    buf_release(&out);
    world_server_free(s);
    world_rules_release(&r);
}

/* The lines that have no answer yet. */
struct env_lines {
    const char *at, *end;
};

static int env_exchange(void *ctx, const struct buf *line, const char **answer, size_t *len,
                        struct error *err) {
    struct env_lines *in = ctx;
    json_t *asked = json_parse(line->data, line->len, "request", err);
    MUST(asked != NULL);
    json_decref(asked);
    if (in->at >= in->end) return error_set(err, ERR_STATE, "it ended");
    const char *stop = memchr(in->at, '\n', (size_t)(in->end - in->at));
    *answer = in->at;
    *len = (size_t)((stop ? stop : in->end) - in->at);
    in->at = stop ? stop + 1 : in->end;
    return OK;
}

/* For any answers of the program, every living agent has a prompt and a finite reward. */
static void env_use(struct environment *const *e, int worlds, struct error *err) {
    static int16_t actions[ENV_MAX_AGENTS];
    static double rewards[ENV_MAX_AGENTS];
    struct buf text = {0};
    int rc = OK;
    for (int k = 0; k < worlds; k++) e[k]->will_reset(e[k]->ctx, (uint64_t)k);
    for (int k = 0; rc == OK && k < worlds; k++) rc = e[k]->reset(e[k]->ctx, (uint64_t)k, err);
    for (int tick = 0; rc == OK && tick < 8; tick++)
        for (int k = 0; rc == OK && k < worlds; k++) {
            for (int i = 0; i < e[k]->n_agents; i++) {
                text.len = 0;
                bool acts = e[k]->prompt(e[k]->ctx, i, &text) && !e[k]->is_truncated(e[k]->ctx, i);
                MUST(!acts || text.len > 0);
                int taught = acts && e[k]->expert_action ? e[k]->expert_action(e[k]->ctx, i)
                                                         : tick % e[k]->n_actions;
                MUST(taught >= 0 && taught < e[k]->n_actions);
                actions[i] = (int16_t)(acts ? taught : -1);
            }
            rc = e[k]->step(e[k]->ctx, actions, rewards, err);
            for (int i = 0; rc == OK && i < e[k]->n_agents; i++) MUST(rewards[i] == rewards[i]);
            MUST(e[k]->parse(e[k]->ctx, text.data ? text.data : "") < e[k]->n_actions);
        }
    MUST(rc == OK || err->text[0]);
    buf_release(&text);
}

static void fuzz_world_env(const uint8_t *data, size_t size) {
    for (int worlds = 1; worlds <= 2; worlds++) {
        struct error err = {0};
        struct env_lines in = {(const char *)data, (const char *)data + size};
        struct external_envs *c = external_envs_new(env_exchange, &in, worlds, size % 2 == 0, &err);
        if (c) env_use(external_envs_list(c), worlds, &err);
        external_envs_free(c);
    }
}

/* Two founders over a tiny model, and the folder where they are saved. */
static struct simulation *life_founded(const char *dir) {
    static struct simulation_options o;
    static struct grid_env place;
    static struct environment env, *list = &env;
    static struct world_rules rules;
    struct model_config c;
    struct error err;
    options_default(simulation_option_rows, &o);
    options_default(learner_option_rows, &o.learn);
    snprintf(o.decode, 5, "text"); // not "score": the action words would begin with the same byte
    snprintf(o.learn.learn, 5, "none");
    o.learn.train.r = 1;
    o.n_envs = 1;
    MUST(world_rules_load(&rules, "repaired", &err) == OK);
    place = (struct grid_env){.rules = &rules, .n_agents = 2};
    env = grid_env_as_environment(&place);
    MUST(model_preset_find("tiny-llama", &c, &err) == OK);
    static struct model *m;
    m = model_new_random(&c, 1, NUMERIC_EXACT);
    struct simulation *l = simulation_new(m, &o, &list, NULL, 0, NULL, &err);
    MUST(l != NULL);
    json_t *extra = json_object();
    MUST(simulation_save(l, dir, extra, &err) == OK);
    json_decref(extra);
    return l;
}

static json_t *life_resaved(struct simulation *l, const char *dir, const json_t *extra) {
    struct error err;
    MUST(simulation_save(l, dir, extra, &err) == OK);
    json_t *v = simulation_read_state(dir, &err);
    MUST(v != NULL);
    return v;
}

/* An accepted state is saved as an accepted state, with the same bytes. */
static void fuzz_life_state(const uint8_t *data, size_t size) {
    static struct simulation *l;
    static char dir[400], again[400];
    struct error err;
    if (!l) {
        snprintf(dir, sizeof dir, "%s", fuzz_path("life"));
        snprintf(again, sizeof again, "%s", fuzz_path("life-again"));
        l = life_founded(dir);
    }
    json_t *v = json_parse((const char *)data, size, "input", &err), *extra = json_object();
    if (v && simulation_load(l, dir, v, &err) == OK) {
        json_t *once = life_resaved(l, again, extra);
        MUST(simulation_load(l, again, once, &err) == OK);
        json_t *twice = life_resaved(l, again, extra);
        MUST(json_equal(once, twice));
        json_decref(once);
        json_decref(twice);
    }
    json_decref(extra);
    json_decref(v);
}

/* A server without sockets or threads: a tiny model of bytes, and an adapter, "spare". */
static struct server *server_small(void) {
    static struct serve_options o = {.max_waiting = 64, .max_tokens = 16};
    static struct server s = {.options = &o, .name = (char *)(uintptr_t) "small"};
    struct adapter_pool_options po = {0};
    struct adapter_config c = {.r = 1, .alpha = 2, .target = {[PROJ_Q] = true}};
    struct model_config shape = shape_small();
    struct error err;
    if (s.model) return &s;
    shape.vocab_size = 259;
    s.model = model_new_random(&shape, 1, NUMERIC_EXACT);
    s.path = s.name;
    s.pool = adapter_pool_new(s.model, &po);
    s.reasoning_form = reasoning_form_find("think", NULL, s.model->tok);
    s.adapters = xcalloc(1, sizeof *s.adapters);
    s.adapters[s.n_adapters++] =
        (struct adapter_entry){.name = xstrdup("spare"), .path = xstrdup("x")};
    pthread_mutex_init(&s.lock, NULL);
    s.grammars = grammar_cache_new(NULL);
    struct adapter *a = adapter_new(&shape, &c, 1);
    MUST(adapter_pool_publish(s.pool, "spare", a, &err) == OK);
    adapter_release(a);
    return &s;
}

static void prompts_use(const struct token_ids *prompts, int n, int32_t vocab) {
    for (int i = 0; i < n; i++)
        for (int32_t k = 0; k < prompts[i].n; k++)
            MUST(prompts[i].v[k] >= 0 && prompts[i].v[k] < vocab);
}

/* The engine accepts the resulting request. */
static void spec_use(struct server *s, struct model_ref *t, struct generation_spec *spec,
                     bool read) {
    if (read) {
        const struct sampling_params *p = &spec->sampling;
        MUST(spec->n_prompts >= 1 && spec->n >= 1 && spec->max_tokens >= 0);
        MUST(p->temperature >= 0 && p->top_p > 0 && p->top_p <= 1 && p->top_k >= 0);
        MUST(spec->n_stop_ids <= (int)ARRAY_LEN(spec->stop_ids) && t->n <= ENGINE_MIX_MAX);
        MUST(spec->n_top <= ENGINE_TOP_MAX && t->name && t->label);
        for (int i = 0; i < spec->stop_texts.n; i++) MUST(*spec->stop_texts.v[i]);
        prompts_use(spec->prompts, spec->n_prompts, tokenizer_vocab_size(s->model->tok));
    }
    if (spec->grammar) server_grammar_release(s, spec->grammar);
    generation_spec_release(spec);
    model_ref_release(t);
}

/* Every reader reads an unmodified copy of every body, because reading changes it. */
static void fuzz_http_json(const uint8_t *data, size_t size) {
    struct server *s = server_small();
    struct buf body = {.data = (char *)(uintptr_t)data, .len = size};
    for (int reader = 0; reader < 5; reader++) {
        struct generation_spec spec = {0};
        struct model_ref t = {0};
        struct token_ids ids = {0}, *texts = NULL;
        struct error err;
        int n = 0, rc = OK;
        json_t *v = json_parse_body(&body, &err);
        if (!v) (void)request_text_check(body.data, body.len, &err);
        size_t len = 0;
        const char *name = request_text_member(body.data, body.len, "model", &len);
        MUST(!name || (name >= body.data && name + len <= body.data + body.len));
        if (!v) return;
        if (reader == 0)
            rc = openai_chat_read(s, v, &t, &spec, &err);
        else if (reader == 1)
            rc = openai_completion_read(s, v, &t, &spec, &err);
        else if (reader == 2)
            (void)vllm_tokenize_read(s, NULL, v, &ids, &err);
        else if (reader == 3)
            (void)prompts_tokenize(s, json_get_nonnull(v, "input"), 16, &texts, &n, &err);
        else
            (void)server_set_scales(s, v, &err);
        spec_use(s, &t, &spec, reader < 2 && rc == OK);
        for (int i = 0; i < n; i++) token_ids_release(&texts[i]);
        free(texts);
        token_ids_release(&ids);
        json_decref(v);
    }
}

/* A root where every path exists except those named "closed". */
static char *job_input(void *ctx, const char *path, bool database, struct error *err) {
    (void)ctx, (void)database;
    if (!strstr(path, "closed")) return xasprintf("/root/%s", path);
    error_set(err, ERR_USAGE, "'%s' is closed", path);
    return NULL;
}

static const struct option_row job_rows[] = {
    {.name = "data", .type = OPT_LIST, .job_policy = JOB_ARG_NAMED_FILE},
    {.name = "out", .type = OPT_STRING, .job_policy = JOB_ARG_OUTPUT_PATH},
    {.name = "output-dir", .type = OPT_ALIAS, .default_value = "out"},
    {.name = "start", .type = OPT_STRING, .job_policy = JOB_ARG_INPUT_PATH},
    {.name = "policy", .type = OPT_LIST, .job_policy = JOB_ARG_BUILTIN_OR_PATH},
    {.name = "tasks", .type = OPT_STRING, .job_policy = JOB_ARG_BUILTIN_OR_PATH_LIST},
    {.name = "method", .type = OPT_STRING, .job_policy = JOB_ARG_TEXT},
    {.name = "id", .type = OPT_STRING, .job_policy = JOB_ARG_NAME},
    {.name = "reward", .type = OPT_STRING, .job_policy = JOB_ARG_REWARD},
    {.name = "policy-pipe", .type = OPT_STRING, .job_policy = JOB_ARG_FORBIDDEN},
    {.name = "runs", .type = OPT_STRING, .job_policy = JOB_ARG_SERVER_ONLY},
    {.name = "forgotten", .type = OPT_STRING},
    {.name = "lr", .type = OPT_FLOAT},
    {.name = "threads", .type = OPT_INT, .job_policy = JOB_ARG_THREADS},
    {.name = "breed", .type = OPT_BOOL},
    {0},
};
static const struct job_args job_words[] = {{NULL, {JOB_ARG_INPUT_PATH, JOB_ARG_TEXT}, true}, {0}};
static const struct job_kind job_kinds[] = {{.name = "train",
                                             .resume = "resume",
                                             .store_option = "runs",
                                             .rows = job_rows,
                                             .args = job_words},
                                            {0}};

static int job_line(const json_t *v, struct job_request *r, struct strings *args,
                    struct error *err) {
    const struct job_request_rules rules = {.kinds = job_kinds,
                                            .results_dir = "/results",
                                            .max_threads = 4,
                                            .resolve_input = job_input};
    int rc = job_request_check(&rules, v, r, NULL, err);
    return rc == OK ? job_request_argv(r->resolved, args, err) : rc;
}

/* FILE or NAME=FILE: a name on the hub has no path. */
static bool job_names_hub(const char *value) {
    const char *eq = strchr(value, '=');
    return hub_is_name(value) || (eq && hub_is_name(eq + 1));
}

/* Outputs are below the folder of results, inputs below the root. */
static void job_argument_check(const char *arg) {
    static const char *const reads[] = {"--init-adapter=", "--data="};
    MUST(strncmp(arg, "--", 2) == 0 && arg[2] >= 'a' && arg[2] <= 'z');
    if (strncmp(arg, "--out=", 6) == 0)
        MUST(strncmp(arg + 6, "/results/", 9) == 0 && !strchr(arg + 15, '/') && arg[15] != '.');
    for (size_t i = 0; i < ARRAY_LEN(reads); i++)
        if (strncmp(arg, reads[i], strlen(reads[i])) == 0 && strchr(arg, '/') &&
            !job_names_hub(arg + strlen(reads[i])))
            MUST(strstr(arg, "/root/") && !strstr(strstr(arg, "/root/"), "closed"));
    MUST(strncmp(arg, "--reward=command", 16) != 0 && strncmp(arg, "--reward=shell", 14) != 0);
    MUST(!strstr(arg, "-pipe=") || strchr(arg, '=') < strstr(arg, "-pipe="));
}

/* An accepted request is a command line whose options are one argument each and precede "--"; the
 * request as stored gives the same line. */
static void fuzz_job_request(const uint8_t *data, size_t size) {
    struct buf body = {.data = (char *)(uintptr_t)data, .len = size};
    struct strings args = {0}, again = {0};
    struct job_request r = {0}, twice = {0};
    struct error err;
    json_t *v = json_parse_body(&body, &err);
    if (v && job_line(v, &r, &args, &err) == OK) {
        int i = 1;
        MUST(strcmp(args.v[0], "train") == 0);
        for (; i < args.n && strcmp(args.v[i], "--") != 0; i++) job_argument_check(args.v[i]);
        MUST(i < args.n);
        MUST(job_line(r.normalized, &twice, &again, &err) == OK &&
             json_equal(r.normalized, twice.normalized));
        MUST(args.n == again.n);
    }
    job_request_release(&r);
    job_request_release(&twice);
    strings_release(&args);
    strings_release(&again);
    json_decref(v);
}

/* A log of API keys with any events: refused as a whole, or keys that can be listed and looked
 * up. */
static void fuzz_key_log(const uint8_t *data, size_t size) {
    struct error err;
    json_t *v = json_parse((const char *)data, size, "input", &err);
    if (!json_is_array(v)) {
        json_decref(v);
        return;
    }
    char path[400];
    snprintf(path, sizeof path, "%s", fuzz_path("keys.db"));
    unlink(path);
    struct store *s = store_open(path, &err);
    MUST(s != NULL);
    bool put = store_log_append(s, "keys", 1, v, &err) == OK;
    store_close(s);
    struct keys *k = put ? keys_open(path, &err) : NULL;
    if (k) {
        struct key_decision a;
        json_t *list = keys_list(k, 1e9);
        MUST(json_is_array(list) && json_array_size(list) <= json_array_size(v));
        MUST(keys_authorize(k, "sk-shoal-no-such-key", 1, 1e9, &a) != KEY_ADMITTED);
        json_decref(list);
    }
    keys_close(k);
    json_decref(v);
}

/* A model's output, one token per byte: reasoning and tool calls are found while it grows, and at
 * its end. */
static void fuzz_tool_call(const uint8_t *data, size_t size) {
    static const char *const templates[8] = {
        "", "[TOOL_CALLS]", "<|tool_call|>", "<｜tool▁call▁begin｜>", "<|python_tag|>", "", "", ""};
    static char offered[] = "f";
    static char *names[] = {offered}, stop_text[] = "\n\nUser:";
    static char *stops[] = {stop_text};
    static const char *const parsers[] = {"think", "command_a", "mistral"};
    struct server *s = server_small();
    size = MIN(size, 1 << 20);
    if (size < 2) return;
    s->reasoning_form =
        reasoning_form_find(parsers[data[1] % ARRAY_LEN(parsers)], NULL, s->model->tok);
    int how = data[0] % 8, step = 1 + data[1] * data[1]; // 1 to 65026 tokens at a time
    if (size > 4096) step = MAX(step, (int)(size / 64));
    struct generation g = {
        .s = s,
        .spec = {.tool_choice = how & 1 ? TOOL_CHOICE_AUTO : TOOL_CHOICE_REQUIRED,
                 .tool_form = tool_form_find(templates[data[0] / 8 % 8]),
                 .single_tool_call = how & 2,
                 .reasoning = true,
                 .tool_names = {names, 1},
                 .stop_texts = {stops, how & 4 ? 1 : 0}}};
    struct completion a = {.reasoning_state = (enum reasoning_state)(data[0] / 64)};
    int32_t n = (int32_t)size - 2, *out = xcalloc((size_t)n + 1, sizeof *out);
    for (int32_t i = 0; i < n; i++) out[i] = s->model->tok->byte_ids[data[i + 2]];
    a.batch_request.request.out = out;
    for (int32_t seen = 0; !a.done;) {
        seen = MIN(seen + step, n);
        a.batch_request.request.n_out = a.batch_request.n_visible = seen;
        a.batch_request.done = seen == n;
        if (a.batch_request.done) buf_add(&a.batch_request.request.text, data + 2, (size_t)n);
        completion_advance(&g, &a);
        MUST(a.shown <= a.text.len && a.content_end <= a.shown);
        MUST(a.content_begin <= a.content_end && a.reasoning.len <= a.content_begin);
        for (int i = 0; i < a.n_tool_calls; i++) {
            const struct tool_call *c = &a.tool_calls[i];
            MUST(c->args <= a.text.len && c->args_end <= a.text.len);
            MUST(!c->args_end || c->args <= c->args_end);
            MUST(!a.done || c->name);
        }
    }
    MUST(completion_finish_reason(&a) != NULL && completion_tokens_kept(&a) <= n);
    completion_release(&a);
    s->reasoning_form = reasoning_form_find("think", NULL, s->model->tok);
}

/* Accepted values are text; written and read again they are the same. */
static void config_same(const struct config_file *a, const struct config_file *b) {
    MUST(a->n == b->n && a->n_sections == b->n_sections);
    for (int i = 0; i < a->n; i++) {
        const struct config_entry *x = &a->v[i], *y = &b->v[i];
        MUST(*x->key && strcmp(x->key, y->key) == 0 && strcmp(x->value, y->value) == 0);
        MUST(x->line > 0 && (i == 0 || x->line > a->v[i - 1].line));
    }
}

static void config_write(const struct config_file *c, struct buf *b) {
    for (int i = 0; i < c->n_sections; i++) {
        const struct config_section *s = &c->sections[i];
        if (i > 0) buf_printf(b, "[%s]\n", s->name);
        for (int k = s->first; k < s->first + s->n; k++) {
            const char *quote = strchr(c->v[k].value, '"') ? "" : "\"";
            buf_printf(b, "%s = %s%s%s\n", c->v[k].key, quote, c->v[k].value, quote);
        }
    }
}

static void fuzz_config(const uint8_t *data, size_t size) {
    static const struct option_row rows[] = {
        {"port", OPT_INT, 0, "1", 0, 65535, NULL, NULL},
        {"rate", OPT_FLOAT, 8, NULL, 0, 0, NULL, NULL},
        {"name", OPT_STRING, 16, NULL, 0, 0, NULL, NULL},
        {"item", OPT_LIST, 24, "a,b", 0, 0, NULL, NULL},
        {"loud", OPT_BOOL, 24 + sizeof(struct strings), NULL, 0, 0, NULL, NULL},
        {0},
    };
    struct config_file c, again;
    struct error err;
    struct buf b = {0};
    _Alignas(8) char out[64 + sizeof(struct strings)];
    if (config_parse(&c, "c", (const char *)data, size, &err) != OK) return;
    config_write(&c, &b);
    /* Quotes may make a line, or the file, longer than the limits. */
    if (config_parse(&again, "c", b.data ? b.data : "", b.len, &err) == OK) {
        config_same(&c, &again);
        config_release(&again);
    } else {
        MUST(strstr(err.text, "longer than") || strstr(err.text, "larger than"));
    }
    options_default(rows, out);
    (void)options_from_config(rows, out, &c, "serve", "serve", NULL, &err);
    options_release(rows, out);
    buf_release(&b);
    config_release(&c);
}

/* A Host, and a list of X-Forwarded-For behind a trusted proxy. An address parses again from its
 * text, and the client's address is not a trusted proxy, unless it is the first of the list. */
static void fuzz_address(const uint8_t *data, size_t size) {
    char *text = strndup((const char *)data, size), out[IP_ADDRESS_TEXT_LEN];
    struct ip_cidr trusted, other;
    struct ip_address a, b;
    struct error err;
    MUST(text && ip_cidr_parse("10.0.0.0/8", &trusted, &err) == OK);
    if (ip_address_from_forwarded(text, &trusted, 1, &a)) {
        ip_address_format(&a, out);
        MUST(ip_address_parse(out, strlen(out), &b) && memcmp(&a, &b, sizeof a) == 0);
        const char *first = text + strspn(text, " \t");
        size_t n = strcspn(first, ", \t");
        bool is_first = ip_address_parse(first, n, &b) && memcmp(&a, &b, sizeof a) == 0;
        MUST(is_first || !ip_address_in_cidrs(&a, &trusted, 1));
    }
    if (host_header_is_ip(text)) MUST(ip_address_parse(text, strlen(text), &a));
    if (ip_cidr_parse(text, &other, &err) == OK) MUST(ip_address_in_cidrs(&other.first, &other, 1));
    host_header_is(text, "localhost");
    free(text);
}

/* An expression. An exact result without a fraction is an expression with itself as result. */
static void fuzz_calculate(const uint8_t *data, size_t size) {
    char *text = strndup((const char *)data, size);
    struct buf out = {0}, again = {0};
    struct error err;
    MUST(text != NULL);
    int rc = agent_calculate(text, &out, &err);
    MUST(rc == OK ? out.len > 0 : rc == ERR_USAGE && out.len == 0 && *err.text);
    if (rc == OK && out.len <= 4096 && !strstr(out.data, "≈")) {
        if (agent_calculate(out.data, &again, &err) != OK)
            check_failed(__FILE__, __LINE__, err.text);
        MUST(strcmp(out.data, again.data) == 0);
    }
    buf_release(&again);
    buf_release(&out);
    free(text);
}

/* Events of a stream as one text; the parts of the stream do not matter. */
static int mcp_event_add(void *ctx, const char *text, size_t len, struct error *err) {
    (void)err;
    buf_add(ctx, text, len);
    buf_puts(ctx, "\n====\n");
    return OK;
}

static void mcp_message_use(const char *text, size_t len) {
    struct json_limits left = {.depth = 64, .cost = 64 << 20, .allow_duplicate_keys = true};
    struct mcp_tools tools = {0};
    struct buf out = {0};
    struct error err;
    json_t *v = json_parse_limited(text, len, "a message", &left, &err);
    const struct mcp_message m = mcp_message_read(v);
    if (m.kind == MCP_REQUEST || m.kind == MCP_NOTIFICATION) MUST(m.method);
    if (m.kind == MCP_RESPONSE) MUST(m.result || m.error);
    int rc = mcp_tools_read(m.result, &tools, &err);
    MUST(rc == OK || rc == ERR_FORMAT || rc == ERR_MEMORY);
    for (int i = 0; i < tools.n; i++) MUST(*tools.v[i].name);
    mcp_result_text(m.result, 1000, &out);
    MUST(out.len <= 1000 && (!out.data || strlen(out.data) <= out.len));
    MUST(!out.data || !u8_check((const uint8_t *)out.data, out.len));
    mcp_tools_release(&tools);
    buf_release(&out);
    json_decref(v);
}

/* A message of an MCP server, and a stream of events with such messages. */
static void fuzz_mcp(const uint8_t *data, size_t size) {
    const char *text = (const char *)data;
    struct event_stream whole = {0}, parts = {0};
    struct buf events = {0}, same = {0};
    struct error err;
    mcp_message_use(text, size);
    MUST(event_stream_add(&whole, text, size, mcp_event_add, &events, &err) == OK);
    for (size_t i = 0; i < size; i++)
        MUST(event_stream_add(&parts, text + i, 1, mcp_event_add, &same, &err) == OK);
    MUST(events.len == same.len && (!same.len || !memcmp(events.data, same.data, same.len)));
    MUST(strcmp(whole.id, parts.id) == 0 && whole.retry_ms == parts.retry_ms);
    for (const char *p = events.data, *end; p && (end = strstr(p, "\n====\n")); p = end + 6)
        mcp_message_use(p, (size_t)(end - p));
    event_stream_release(&whole);
    event_stream_release(&parts);
    buf_release(&events);
    buf_release(&same);
}

/* Frames of a bus: all of them, from any position on, are within the input. */
static void cluster_frames_use(const uint8_t *data, size_t size) {
    struct bus_frame f;
    int64_t n;
    for (size_t at = 0; (n = bus_frame_parse(data + at, size - at, &f)) > 0; at += (size_t)n) {
        MUST(at + (size_t)n <= size && f.data + f.len == data + at + n);
        MUST(strlen(f.name) < BUS_NAME_MAX);
        struct buf copy = {0};
        bus_frame_add(&copy, f.op, f.number, f.name, f.data, f.len);
        MUST(copy.len == (size_t)n && memcmp(copy.data, data + at, copy.len) == 0);
        buf_release(&copy);
    }
}

/* Calls that are accepted have the same key when they are written and read again. */
static void cluster_calls_use(const uint8_t *data, size_t size) {
    struct unit_calls u, again;
    struct error err;
    if (unit_calls_parse(data, size, &u, &err) == OK) {
        struct strings hashes = {0};
        struct buf text = {0};
        char id[HASH_LEN], same[HASH_LEN];
        unit_calls_adapters(&u, &hashes);
        if (hashes.n == 0) {
            struct engine_request *calls[1] = {u.v}, *calls_again[1];
            unit_calls_write(calls, 1, &text);
            MUST(unit_calls_parse((const uint8_t *)text.data, text.len, &again, &err) == OK);
            calls_again[0] = again.v;
            unit_id(calls, 1, "", id);
            unit_id(calls_again, 1, "", same);
            MUST(strcmp(id, same) == 0);
            unit_calls_release(&again);
        }
        buf_release(&text);
        strings_release(&hashes);
    }
    unit_calls_release(&u);
}

/* Results for a call of each kind: they are refused, or have the sizes of the call. */
static void cluster_results_use(const uint8_t *data, size_t size) {
    static const int32_t prompt[] = {1, 2}, choice[] = {3};
    const struct token_seq choices[] = {{choice, 1}, {prompt, 2}};
    struct engine *e = engine_small(DTYPE_F32);
    const struct engine_request kinds[] = {
        {
            .prompt = prompt,
            .n_prompt = 2,
            .max_tokens = 8,
            .n_top = 2,
        },
        {.prompt = prompt, .n_prompt = 2, .choices = choices, .n_choices = 2},
        {.prompt = prompt, .n_prompt = 2, .prompt_logprobs = true, .n_top = 1}};
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        struct engine_request r = kinds[i], *calls[1] = {&r};
        struct error err;
        if (unit_results_parse(e, data, size, calls, 1, &err) == OK)
            MUST(r.done && r.n_out <= r.max_tokens && r.choice < MAX(r.n_choices, 1));
        engine_request_release(&r);
    }
    engine_free(e);
}

/* Parts and results of a streamed call that has a token. */
static void cluster_stream_use(const uint8_t *data, size_t size) {
    static const int32_t prompt[] = {1, 2};
    struct engine *e = engine_small(DTYPE_F32);
    for (int32_t at = -1; at < 9; at++) {
        int32_t out[8] = {3}, top_ids[16] = {1, 2};
        float out_logprob[8] = {-0.5f}, top_logprob[16] = {-1, -2};
        struct engine_request r = {.prompt = prompt,
                                   .n_prompt = 2,
                                   .max_tokens = 8,
                                   .n_top = 2,
                                   .out = out,
                                   .out_logprob = out_logprob,
                                   .top_ids = top_ids,
                                   .top_logprob = top_logprob,
                                   .n_out = 1};
        struct error err;
        unit_part_merge(e, data, size, at, &r, &err);
        MUST(r.n_out >= 1 && r.n_out <= 8 && out[0] == 3 && top_ids[1] == 2);
        unit_result_merge(e, data, size, &r, &err);
        MUST(r.n_out >= 1 && r.n_out <= 8 && out[0] == 3 && top_ids[1] == 2);
        buf_release(&r.text);
    }
    engine_free(e);
}

static void fuzz_cluster(const uint8_t *data, size_t size) {
    const uint8_t *body;
    size_t len;
    const struct bus_message m = {.subject = "", .data = data, .len = size};
    json_t *v = wire_read(&m, &body, &len);
    MUST(!v || body + len == data + size);
    json_decref(v);
    cluster_frames_use(data, size);
    cluster_calls_use(data, size);
    cluster_results_use(data, size);
    cluster_stream_use(data, size);
}

static bool pbft_verify_any(const uint8_t *key, const void *p, size_t n, const uint8_t *signature) {
    (void)key, (void)p, (void)n, (void)signature;
    return true;
}

static void pbft_sign_zero(const uint8_t *secret, const void *p, size_t n, uint8_t *out) {
    (void)secret, (void)p, (void)n;
    memset(out, 0, PBFT_SIGNATURE);
}

static enum pbft_verdict pbft_agree(void *ctx, const uint8_t *entry, size_t len) {
    (void)ctx, (void)entry, (void)len;
    return PBFT_AGREES;
}

/* Messages, each after its length (16 bits): an accepted one has one encoding, and a replica and a
 * client that believe every signature handle it. */
static void fuzz_pbft(const uint8_t *data, size_t size) {
    static const struct pbft_signer signer = {pbft_sign_zero, pbft_verify_any};
    static const uint8_t secret[PBFT_SECRET_KEY];
    const struct pbft_group group = {.n = 4};
    struct pbft *p = pbft_new(&(struct pbft_options){.group = group,
                                                     .self = 1,
                                                     .secret = secret,
                                                     .signer = &signer,
                                                     .timeout = 1,
                                                     .validate = pbft_agree});
    struct pbft_client *c = pbft_client_new(
        &(struct pbft_client_options){.group = group, .secret = secret, .signer = &signer});
    struct pbft_actions actions = {0};
    double now = 0;
    while (size >= 2) {
        size_t len = MIN((size_t)data[0] | (size_t)data[1] << 8, size - 2);
        struct pbft_message m;
        struct pbft_entry e;
        struct error err;
        if (pbft_message_parse(data + 2, len, &m, &err) == OK) {
            struct buf same = {0};
            pbft_message_write(&m.s, m.body, m.body_len, m.signature, &same);
            MUST(same.len == len && memcmp(same.data, data + 2, len) == 0);
            buf_release(&same);
        }
        pbft_vote_read(&signer, secret, data + 2, len, &e);
        pbft_step(
            p,
            &(struct pbft_event){.kind = PBFT_RECEIVED, .now = now, .data = data + 2, .len = len},
            &actions);
        pbft_step(p, &(struct pbft_event){.kind = PBFT_TICK, .now = now += 0.3}, &actions);
        for (int kind = PBFT_CLIENT_VOTE; kind <= PBFT_CLIENT_RECEIVED; kind++)
            pbft_client_step(c,
                             &(struct pbft_client_event){.kind = (enum pbft_client_event_kind)kind,
                                                         .data = data + 2,
                                                         .len = len},
                             &actions);
        for (int i = 0; i < actions.n; i++) // what it sends is well formed
            MUST(actions.v[i].kind != PBFT_SEND ||
                 pbft_message_parse(pbft_action_data(&actions, &actions.v[i]), actions.v[i].len, &m,
                                    &err) == OK);
        MUST(pbft_stable(p) <= pbft_executed(p));
        actions.n = 0;
        actions.bytes.len = 0;
        data += 2 + len;
        size -= 2 + len;
    }
    pbft_actions_release(&actions);
    pbft_client_free(c);
    pbft_free(p);
}

/* The values of an accepted page are within their ranges. */
static void fuzz_metrics_page(const uint8_t *data, size_t size) {
    struct metrics_sample s;
    struct error err;
    if (metrics_sample_parse((const char *)data, size, &s, &err) == OK)
        MUST(s.cpu_seconds >= 0 && s.cpus >= 1 && s.waiting >= 0 && s.memory >= 0 && s.memory <= 1);
}

static const struct fuzz_target fuzz_targets[] = {
    {"gguf", fuzz_gguf},
    {"gguf_tokenizer", fuzz_gguf_tokenizer},
    {"safetensors", fuzz_safetensors},
    {"hf", fuzz_hf},
    {"tokenizer_json", fuzz_tokenizer_json},
    {"sentencepiece", fuzz_sentencepiece},
    {"llama2c", fuzz_llama2c},
    {"text", fuzz_text},
    {"json", fuzz_json},
    {"questions", fuzz_questions},
    {"csv", fuzz_csv},
    {"task_recipe", fuzz_task_recipe},
    {"yaml", fuzz_yaml},
    {"agent", fuzz_agent},
    {"fallback", fuzz_fallback},
    {"prompt_profile", fuzz_prompt_profile},
    {"recipe", fuzz_recipe},
    {"training_data", fuzz_training_data},
    {"synth", fuzz_synth},
    {"peft", fuzz_peft},
    {"checkpoint", fuzz_checkpoint},
    {"gguf_lora", fuzz_gguf_lora},
    {"tok_norm", fuzz_tok_norm},
    {"jinja", fuzz_jinja},
    {"go_template", fuzz_go_template},
    {"modelfile", fuzz_modelfile},
    {"regex", fuzz_regex},
    {"gbnf", fuzz_gbnf},
    {"json_schema", fuzz_json_schema},
    {"session", fuzz_session},
    {"hub", fuzz_hub},
    {"backup_manifest", fuzz_backup_manifest},
    {"workflow", fuzz_workflow},
    {"team", fuzz_team},
    {"grade", fuzz_grade},
    {"document", fuzz_document},
    {"board", fuzz_board},
    {"rules", fuzz_rules},
    {"world", fuzz_world},
    {"trace", fuzz_trace},
    {"world_pipe", fuzz_world_pipe},
    {"world_env", fuzz_world_env},
    {"life_state", fuzz_life_state},
    {"http_json", fuzz_http_json},
    {"job_request", fuzz_job_request},
    {"key_log", fuzz_key_log},
    {"tool_call", fuzz_tool_call},
    {"address", fuzz_address},
    {"config", fuzz_config},
    {"calculate", fuzz_calculate},
    {"mcp", fuzz_mcp},
    {"cluster", fuzz_cluster},
    {"pbft", fuzz_pbft},
    {"metrics_page", fuzz_metrics_page},
};

static const struct fuzz_target *fuzz_target_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(fuzz_targets); i++)
        if (strcmp(fuzz_targets[i].name, name) == 0) return &fuzz_targets[i];
    return NULL;
}

#endif
