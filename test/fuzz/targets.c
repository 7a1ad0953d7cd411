/*
 * targets: one row for every parser that takes bytes from outside, and what must hold of it.
 *
 * A target is a function of (bytes, size) that may refuse its input with an error but may neither
 * crash, leak, nor break a contract; where a parser has a property worth more than that (what was
 * accepted can be used, what was decoded is what was encoded, what was saved loads as the same),
 * the target checks it. It is included by test/fuzz/fuzzer.c, which searches for inputs, and by
 * test/test_fuzz.c, which runs those that are kept in test/fuzz/corpus/NAME/.
 *
 * To add a parser: write a function here, add a row to fuzz_targets, and put at least one good and
 * one bad input into test/fuzz/corpus/NAME/ (test/fuzz/dict/NAME.dict may list its words).
 *
 * Parsers that open paths get a file in a folder of this process's own, in memory where the machine
 * has such a place. Formats of several files are one input: the parts stand between lines of
 * "====".
 */
#ifndef SHOAL_TEST_FUZZ_TARGETS_C
#define SHOAL_TEST_FUZZ_TARGETS_C

#include "evolve/evolve.h"
#include "model/model_files.h"
#include "store/store.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* fuzz_dir/NAME; good until the second next call. */
static const char *fuzz_path(const char *name) {
    static char paths[4][400];
    static int turn;
    if (!fuzz_dir[0]) {
        const char *given = getenv("FUZZ_DIR"); /* of who cleans up after a crash */
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
    MUST(fwrite(p.data, 1, p.size, f) == p.size);
    MUST(fclose(f) == 0);
    return path;
}

/* The whole input as one file. */
static const char *input_put(const uint8_t *data, size_t size) {
    return part_put("input", (struct part){data, size});
}

/* Cuts at lines of "===="; the last part takes the rest. Returns how many there are. */
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

/* Makes the folder `dir` hold exactly the parts, under these names (an empty part: no file). */
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

/* What was accepted can be used: text of several scripts, with bytes that are no text, is encoded,
 * and every id is one of the vocabulary's. */
static void tokenizer_use(const struct tokenizer *t) {
    static const char text[] = "Hello  world 123'll\n\t日本語のテキスト、漢字。中文标点 emoji 🐟 "
                               "<s></s><|im_start|>a\xFF\xC3\xE3\x81 end";
    struct ids ids = {0};
    struct buf back = {0};
    tok_encode(t, text, sizeof text - 1, TOK_BOS | TOK_SPECIAL, &ids);
    for (int i = 0; i < ids.n; i++) MUST(ids.v[i] >= 0 && ids.v[i] < tok_vocab_size(t));
    tok_decode_all(t, ids.v, ids.n, true, &back);
    MUST(tok_bos(t) < tok_vocab_size(t) && tok_eos(t) < tok_vocab_size(t));
    ids_release(&ids);
    buf_release(&back);
}

static void tokenizer_done(struct tokenizer *t) {
    if (t) tokenizer_use(t);
    tok_free(t);
}

/* One token through the whole model: shapes that lie would read out of bounds here. */
static void model_use(struct model *m) {
    struct error err;
    struct forward_options o = {.max_rows = 1, .n_slots = 1, .slot_len = 1};
    struct row row = {0};
    int32_t last = 0;
    if (m->tok) tokenizer_use(m->tok);
    MUST(model_hash(m, &err) != NULL);
    struct forward *f = forward_new(m, &o);
    float *logits = xcalloc((size_t)m->config.vocab_size, sizeof *logits);
    forward_run(f, &row, 1, &(struct segment){.end = 1}, 1, &last, 1, logits);
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
    model_done(model_open(path, CLASS_EXACT, &err));
    if (kernels_default_class() == CLASS_FAST) model_done(model_open(path, CLASS_FAST, &err));
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
        hash_bytes(st.tensors[i].data, st.tensors[i].size, hash);
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
    model_done(model_open(dir, CLASS_EXACT, &err));
}

static void fuzz_tokenizer_json(const uint8_t *data, size_t size) {
    struct error err;
    tokenizer_done(tok_from_json(input_put(data, size), &err));
}

static void fuzz_sentencepiece(const uint8_t *data, size_t size) {
    struct error err;
    tokenizer_done(tok_from_sentencepiece(input_put(data, size), &err));
}

/* The tokenizer first, because the weights are binary to the end. */
static void fuzz_llama2c(const uint8_t *data, size_t size) {
    static const char *const names[] = {"tokenizer.bin", "model.bin"};
    struct error err;
    parts_put("llama2c", names, ARRAY_LEN(names), data, size);
    model_done(llama2c_open(fuzz_path("llama2c/model.bin"), fuzz_path("llama2c/tokenizer.bin"),
                            CLASS_EXACT, &err));
}

/* Byte-level BPE gives every text back, whatever its bytes. */
static void fuzz_text(const uint8_t *data, size_t size) {
    static const char corpus[] = "the cat and the dog, 今日は今日、明日は明日。我们的我们 the the";
    static struct tokenizer *t;
    const char *text = (const char *)data;
    struct error err;
    struct ids ids = {0};
    struct buf back = {0};
    if (!t) t = tok_train_bpe(corpus, sizeof corpus - 1, 270, "qwen2", NULL, 0, &err);
    MUST(t != NULL);
    tok_encode(t, text, size, 0, &ids);
    tok_decode_all(t, ids.v, ids.n, true, &back);
    MUST(back.len == size && (size == 0 || memcmp(back.data, text, size) == 0));
    ids_release(&ids);
    buf_release(&back);
}

static void fuzz_json(const uint8_t *data, size_t size) {
    struct error err;
    json_t *v = json_parse((const char *)data, size, "input", &err);
    if (!v) return;
    char *text = json_text(v);
    json_t *again = json_parse(text, strlen(text), "its own text", &err);
    char *second = again ? json_text(again) : NULL;
    MUST(second && strcmp(text, second) == 0);
    free(text);
    free(second);
    json_decref(v);
    json_decref(again);
}

static void fuzz_yaml(const uint8_t *data, size_t size) {
    struct error err;
    struct yaml y;
    if (yaml_load(&y, input_put(data, size), &err) != OK) return;
    free(json_text(y.root));
    yaml_release(&y);
}

static void fuzz_recipe(const uint8_t *data, size_t size) {
    struct error err;
    struct run_options o;
    int rc = run_recipe_load(&o, input_put(data, size), &err);
    MUST(rc != OK || (o.personas.n >= 2 && o.tasks.n >= 1));
    run_options_release(&o);
}

static void fuzz_training_data(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    struct error err;
    struct dataset d;
    if (!t) t = tok_byte_fallback(259);
    if (dataset_load(&d, input_put(data, size), t, 64, &err) != OK) return;
    MUST(d.n > 0 && d.targets > 0 && d.targets <= d.tokens);
    for (int i = 0; i < d.n; i++) MUST(d.v[i].n >= 2 && d.v[i].n <= 64);
    dataset_release(&d);
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

/* What loads can be saved, and is then the same adapter. */
static void fuzz_peft(const uint8_t *data, size_t size) {
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    struct error err;
    struct model_config shape = shape_small();
    const char *dir = parts_put("peft", names, ARRAY_LEN(names), data, size);
    struct adapter *a = adapter_load(dir, &shape, &err);
    if (!a) return;
    MUST(adapter_save(a, fuzz_path("saved"), "base", &err) == OK);
    struct adapter *b = adapter_load(fuzz_path("saved"), &shape, &err);
    MUST(b && strcmp(a->hash, b->hash) == 0);
    adapter_release(a);
    adapter_release(b);
}

static struct trainer *trainer_small(void) {
    struct error err;
    struct train_options o;
    struct model_config shape = shape_small();
    struct adapter_config c = {.r = 1, .alpha = 2, .target = {[PROJ_Q] = true}};
    options_default(train_option_rows, &o);
    struct model *m = model_new(&shape, 1, CLASS_EXACT); /* lives as long as the process */
    struct adapter *a = adapter_new(&shape, &c, 1);
    struct trainer *t = trainer_new_lora(m, &a, 1, &o, NULL, &err);
    MUST(t != NULL);
    adapter_release(a);
    options_release(train_option_rows, &o);
    return t;
}

/* The checksum of the input is made right, or nothing behind it would ever be reached. */
static void fuzz_checkpoint(const uint8_t *data, size_t size) {
    static struct trainer *t;
    struct error err;
    char hash[HASH_LEN];
    struct buf file = {0};
    json_t *extra = NULL;
    if (!t) t = trainer_small();
    buf_add(&file, data, size);
    hash_bytes(data, size, hash);
    buf_add(&file, hash, HASH_LEN - 1);
    if (trainer_load(t, input_put((const uint8_t *)file.data, file.len), &extra, &err) == OK)
        MUST(trainer_save(t, fuzz_path("checkpoint"), extra, &err) == OK);
    json_decref(extra);
    buf_release(&file);
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
    {"yaml", fuzz_yaml},
    {"recipe", fuzz_recipe},
    {"training_data", fuzz_training_data},
    {"peft", fuzz_peft},
    {"checkpoint", fuzz_checkpoint},
};

static const struct fuzz_target *fuzz_target_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(fuzz_targets); i++)
        if (strcmp(fuzz_targets[i].name, name) == 0) return &fuzz_targets[i];
    return NULL;
}

#endif
