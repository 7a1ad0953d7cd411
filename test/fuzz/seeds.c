/*
 * seeds: small valid files of every binary format, as initial inputs of the fuzzer.
 *
 * "make build/seeds; build/seeds test/fuzz/corpus" writes TARGET/seed-* with Shoal's own writers if
 * there is one. The text formats have no row here: their first inputs are hand-written. When a
 * format changes, run it again, and then "FUZZ_KEEP=1 make fuzz".
 */
#define _GNU_SOURCE
#include "targets.c"

static const char *root;

/* A new file of a target; the caller writes it. */
static char *seed_path(const char *target, const char *name) {
    struct error err;
    char *dir = path_join(root, target), *file = xasprintf("%s/seed-%s", dir, name);
    MUST(fuzz_target_find(target) && dir_make(dir, &err) == OK);
    free(dir);
    return file;
}

static void seed_put(const char *target, const char *name, const struct buf *b) {
    struct error err;
    char *path = seed_path(target, name);
    MUST(file_write(path, b->data, b->len, &err) == OK);
    free(path);
}

static void add_file(struct buf *b, const char *path) {
    struct error err;
    MUST(file_read(path, 1 << 20, b, &err) == OK);
}

static void add_mark(struct buf *b) {
    buf_puts(b, "\n====\n");
}

static void add_u32(struct buf *b, uint32_t v) {
    buf_add(b, &v, sizeof v);
}

/* A SentencePiece-style vocabulary of a few pieces, some of them Japanese. */
static const char *pieces[] = {"<unk>", "<s>", "</s>", "▁",  "a",    "b",
                               "ab",    "▁ab", "日",   "本", "日本", "<0x0A>"};
static const uint8_t types[] = {2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 6};

static struct tokenizer *tokenizer_small(enum tokenizer_kind kind, const char *normalizer) {
    int32_t lens[ARRAY_LEN(pieces)];
    float scores[ARRAY_LEN(pieces)];
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++)
        lens[i] = (int32_t)strlen(pieces[i]), scores[i] = -(float)i;
    struct tokenizer_spec spec = {.kind = kind,
                                  .n = ARRAY_LEN(pieces),
                                  .pieces = pieces,
                                  .lens = lens,
                                  .scores = scores,
                                  .types = types,
                                  .normalizer = normalizer,
                                  .unk = 0,
                                  .bos = 1,
                                  .eos = 2,
                                  .add_bos = kind == TOKENIZER_SPM,
                                  .add_space_prefix = true};
    struct tokenizer *t = tokenizer_new(&spec, &err);
    if (!t) check_failed(__FILE__, __LINE__, err.text);
    return t;
}

static struct model *model_small(const char *arch, bool tied, int32_t width,
                                 struct tokenizer *tok) {
    struct model_config c = shape_small();
    c.arch = arch_find(arch);
    c.n_layers = 1;
    c.d_model = c.d_ff = width;
    c.head_dim = width / 2;
    c.tied = tied;
    c.biased = c.arch->biased;
    if (c.arch->learned_pos) c.n_kv_heads = c.n_heads;
    if (c.arch->hf_names != HF_LLAMA) {
        c.query_pre_attn_scalar = c.arch->learned_pos ? 1 : (float)c.head_dim;
        c.rope_local_theta = c.arch->learned_pos ? 0 : 1e4f;
        c.sliding_window = 3;
        c.sliding_layers[0] = 1;
    }
    c.vocab_size = tok ? tokenizer_vocab_size(tok) : 4;
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    tokenizer_free(m->tok);
    m->tok = tok;
    return m;
}

static void seed_gguf(const char *name, struct model *m, enum tensor_type type) {
    struct error err;
    char *path = seed_path("gguf", name), *tok = m->tok ? seed_path("gguf_tokenizer", name) : NULL;
    MUST(model_write_gguf(m, path, type, &err) == OK);
    if (tok) MUST(model_write_gguf(m, tok, type, &err) == OK);
    free(path);
    free(tok);
    model_close(m);
}

/* One of every block type: only the rows of down are long enough for blocks, so the file stays
 * small. */
static void seeds_quantised(void) {
    struct error err;
    struct model_config c = shape_small();
    c.n_layers = c.n_heads = c.n_kv_heads = 1;
    c.d_model = 1;
    c.d_ff = 256;
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    for (int type = 0; type < 64; type++) {
        struct quant_scheme q = quant_pure((enum tensor_type)(type < 63 ? type : TENSOR_NF4));
        if (!tensor_type_is_known(q.type) || tensor_type_block_size(q.type) == 1) continue;
        char *path = seed_path("gguf", q.name);
        MUST(model_quantize_gguf(m, path, &q, NULL, NULL, &err) == OK);
        free(path);
    }
    model_close(m);
}

static void seeds_gguf(void) {
    seeds_quantised();
    seed_gguf("llama-f32", model_small("llama", true, 4, NULL), TENSOR_F32);
    seed_gguf("llama-spm", model_small("llama", false, 4, tokenizer_small(TOKENIZER_SPM, NULL)),
              TENSOR_F16);
    seed_gguf("qwen3-bf16", model_small("qwen3", true, 8, NULL), TENSOR_BF16);
    seed_gguf("llama-q8", model_small("llama", true, 32, NULL), TENSOR_Q8_0);
    seed_gguf("llama-q4", model_small("llama", true, 32, NULL), TENSOR_Q4_0);
    seed_gguf("qwen2-f32", model_small("qwen2", true, 4, NULL), TENSOR_F32);
    seed_gguf("gemma3-f32", model_small("gemma3", true, 4, NULL), TENSOR_F32);
    seed_gguf("bytes", model_small("qwen3", true, 4, tokenizer_new_bytes(259)), TENSOR_F16);
}

static void seeds_hf(void) {
    static const char *const arch[] = {"llama", "qwen3", "qwen2", "gemma3", "gpt_neo"};
    static const char *const parts[] = {"config.json", NULL, "tokenizer.json",
                                        "tokenizer_config.json", "model.safetensors"};
    for (size_t i = 0; i < ARRAY_LEN(arch); i++) {
        struct model *m =
            model_small(arch[i], i > 0, 4, i ? NULL : tokenizer_small(TOKENIZER_SPM, NULL));
        struct error err;
        struct buf b = {0};
        MUST(model_write_hf(m, fuzz_path("seed"), i ? TENSOR_F32 : TENSOR_BF16, &err) == OK);
        for (size_t p = 0; p < ARRAY_LEN(parts); p++) {
            char *path = parts[p] ? path_join(fuzz_path("seed"), parts[p]) : NULL;
            if (p) add_mark(&b);
            if (path && path_exists(path)) add_file(&b, path);
            free(path);
        }
        seed_put("hf", arch[i], &b);
        char *weights = path_join(fuzz_path("seed"), "model.safetensors"),
             *tok = path_join(fuzz_path("seed"), "tokenizer.json");
        b.len = 0;
        add_file(&b, weights);
        seed_put("safetensors", arch[i], &b);
        b.len = 0;
        if (m->tok) add_file(&b, tok), seed_put("tokenizer_json", arch[i], &b);
        unlink(tok);
        free(weights);
        free(tok);
        buf_release(&b);
        model_close(m);
    }
}

static void seed_sentencepiece(const char *name, char model_type, char collapse_spaces) {
    const char trainer[] = {0x12, 2, 0x18, model_type},
               normalizer[] = {0x1A, 4, 0x18, 1, 0x20, collapse_spaces};
    struct buf b = {0};
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        uint8_t len = (uint8_t)strlen(pieces[i]);
        float score = -(float)i;
        buf_add(&b, (uint8_t[]){0x0A, (uint8_t)(len + 9), 0x0A, len}, 4);
        buf_add(&b, pieces[i], len);
        buf_add(&b, "\x15", 1);
        buf_add(&b, &score, 4);
        buf_add(&b, (uint8_t[]){0x18, types[i]}, 2);
    }
    buf_add(&b, trainer, sizeof trainer);
    buf_add(&b, normalizer, sizeof normalizer);
    seed_put("sentencepiece", name, &b);
    buf_release(&b);
}

/* An empty table: two units, and the empty replacement; then a text. */
static void seed_charsmap(void) {
    static const uint32_t units[] = {8, 1u << 10, 0};
    struct buf b = {0};
    buf_add(&b, units, sizeof units);
    buf_add(&b, "", 1);
    add_mark(&b);
    buf_puts(&b, "Ａ  ｶﾞ");
    seed_put("tok_norm", "charsmap", &b);
    buf_release(&b);
}

static void seed_unigram(void) {
    struct error err;
    struct tokenizer *t = tokenizer_small(TOKENIZER_UNIGRAM, "{\"type\":\"NFKC\"}");
    char *path = seed_path("tokenizer_json", "unigram");
    MUST(tokenizer_write_json(t, path, &err) == OK);
    free(path);
    seed_gguf("unigram", model_small("llama", true, 4, t), TENSOR_F16);
}

/* Tokenizer, then weights of any value: llama2.c's file is its header and the number of floats that
 * follows from it. */
static void seed_llama2c(void) {
    static const char *const names[] = {"<unk>", "\n<s>\n", "\n</s>\n", "<0x0A>"};
    static const int32_t header[] = {4, 4, 1, 2, 1, 4, 8};
    struct model_config c = shape_small();
    struct buf b = {0};
    c.n_layers = 1;
    add_u32(&b, 8);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        add_u32(&b, 0);
        add_u32(&b, (uint32_t)strlen(names[i]));
        buf_puts(&b, names[i]);
    }
    add_mark(&b);
    buf_add(&b, header, sizeof header);
    for (int64_t i = 0; i < model_param_count(&c) + (int64_t)c.max_seq_len * c.head_dim; i++) {
        float x = 0.25f * (float)(i % 7 - 3);
        buf_add(&b, &x, sizeof x);
    }
    seed_put("llama2c", "tied", &b);
    buf_release(&b);
}

/* The hashes 1 and 2 of questions, and 3 of an n-gram. */
static struct training_data *training_data_small(void) {
    struct hash_list questions = {xcalloc(2, sizeof(uint64_t)), 2, UINT64_MAX},
                     ngrams = {xcalloc(1, sizeof(uint64_t)), 1, 3};
    for (int i = 0; i < 2; i++) questions.v[i] = (uint64_t)i + 1;
    ngrams.v[0] = 3;
    return training_data_new(questions, ngrams);
}

static void seeds_adapter(void) {
    struct error err;
    struct model_config shape = shape_small();
    struct adapter_config c = {.r = 2, .alpha = 4, .target = {[PROJ_Q] = true, [PROJ_DOWN] = true}};
    struct adapter *a = adapter_new(&shape, &c, 3);
    struct training_data *hashes = training_data_small();
    struct buf b = {0};
    adapter_add_training_data(a, hashes);
    training_data_release(hashes);
    MUST(adapter_save(a, fuzz_path("seed"), "base", &err) == OK);
    add_file(&b, fuzz_path("seed/adapter_config.json"));
    add_mark(&b);
    add_file(&b, fuzz_path("seed/adapter_model.safetensors"));
    add_mark(&b);
    add_file(&b, fuzz_path("seed/training_data.hashes"));
    seed_put("peft", "two", &b);
    b.len = 0;
    struct trainer *t = trainer_small();
    MUST(trainer_save(t, fuzz_path("checkpoint"), NULL, &err) == OK);
    add_file(&b, fuzz_path("checkpoint"));
    b.len -= HASH_LEN - 1;
    seed_put("checkpoint", "new", &b);
    buf_release(&b);
    adapter_release(a);
}

static void seed_gguf_lora(const char *name, struct adapter *a) {
    struct error err;
    char *path = seed_path("gguf_lora", name);
    MUST(adapter_save_gguf(a, path, "base", true, &err) == OK);
    adapter_release(a);
    free(path);
}

/* In Shoal's format: the rows of q have another order in GGUF; two ranks need two scales. */
static void seeds_gguf_lora(void) {
    struct model_config shape = shape_untied();
    struct adapter_module modules[2 * N_PROJ] = {
        [PROJ_Q] = {2, 4}, [PROJ_UP] = {1, 4}, [N_PROJ + PROJ_DOWN] = {3, 1}};
    struct adapter_config plain = {.r = 1, .alpha = 2, .target = {[PROJ_Q] = true}},
                          mixed = {.r = 1, .alpha = 2, .rslora = true, .modules = modules},
                          tables = {.r = 1, .alpha = 2, .target = {[PROJ_V] = true}};
    tables.embed.lora = tables.head.lora = (struct adapter_module){2, 2};
    seed_gguf_lora("plain", adapter_new(&shape, &plain, 3));
    seed_gguf_lora("mixed", adapter_new(&shape, &mixed, 3));
    float *data = xmalloc(adapter_param_count(&shape, &tables) * sizeof *data);
    for (size_t i = 0; i < adapter_param_count(&shape, &tables); i++)
        data[i] = 0.25f * (float)(i % 7);
    seed_gguf_lora("tables", adapter_from_owned_data(&shape, &tables, data, NULL));
}

/* An engine's state after three tokens, in both forms of the cache. */
static void seeds_session(void) {
    static const int32_t tokens[] = {1, 2, 3};
    for (int i = 0; i < 2; i++) {
        struct error err;
        struct engine *e = engine_small(i ? DTYPE_I8 : DTYPE_F32);
        struct token_seq seq = {tokens, ARRAY_LEN(tokens)};
        struct engine_request r = {.prompt = tokens, .n_prompt = seq.n, .max_tokens = 1};
        struct buf b = {0};
        MUST(engine_run(e, &r, 1, NULL, &err) == OK);
        MUST(engine_session_save(e, seq, NULL, "base", fuzz_path("session"), &err) == OK);
        add_file(&b, fuzz_path("session"));
        b.len -= HASH_LEN - 1;
        seed_put("session", i ? "i8" : "f32", &b);
        buf_release(&b);
        engine_request_release(&r);
        engine_free(e);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: seeds DIR\n"), 2;
    root = argv[1];
    seeds_gguf();
    seeds_hf();
    seed_sentencepiece("bpe", 2, 0);
    seed_sentencepiece("unigram", 1, 1);
    seed_charsmap();
    seed_unigram();
    seed_llama2c();
    seeds_adapter();
    seeds_gguf_lora();
    seeds_session();
    return 0;
}
