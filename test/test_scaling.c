/*
 * test_scaling: the time of every parser, and of all code that stores external data, is linear in
 * the size of its input.
 *
 * A row makes an input of a given size and runs the code on it. Sizes double from the row's first
 * until its top, or until one run takes STEP_SECONDS and there are LEAST_SIZES. No size may take
 * more than RATIO times as long per byte as a smaller one: code in O(n²) takes eight times as long
 * per byte after three doublings. The measured value is processor time, the minimum of the runs of
 * a size; a ratio that is too large is measured again up to TRIES times, so that a busy machine
 * costs time and not a failure. Under sanitizers the sizes are 1/16. SHOAL_SCALING=WORD limits the
 * test to the rows whose names contain the word, and SHOAL_SCALING_SHOW=1 prints the times.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"
#include "evolve/evolve.h"
#include "fuzz/targets.c"

#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SHRINK = 16 };
#else
enum { SHRINK = 1 };
#endif

enum { SIZES = 16, LEAST_SIZES = 4, TRIES = 8, KB = 1 << 10, MB = 1 << 20 };
/* Below TICK_SECONDS a run is too short to compare. */
static const double STEP_SECONDS = 0.04, SLOW_SECONDS = 5, TICK_SECONDS = 1e-3, RATIO = 3;

static char scratch[256];

/* The input is made once per size; only `run` is timed. It fails the test if the result is not the
 * expected one. */
struct scale {
    const char *name;
    size_t first, top;
    void (*make)(struct buf *b, size_t size);
    void (*run)(const struct buf *b);
};

/* HEAD UNIT UNIT ... TAIL, without the last byte of the last unit (a comma). */
static void repeat(struct buf *b, const char *head, const char *unit, const char *tail,
                   size_t size) {
    size_t n = strlen(unit);
    struct error err;
    assert_int_equal(buf_reserve(b, size + n + 64, &err), OK);
    buf_puts(b, head);
    while (b->len < size) buf_add(b, unit, n);
    b->len--;
    buf_puts(b, tail);
}

/* The same with a number for the unit's %zu. */
static void count(struct buf *b, const char *head, const char *unit, const char *tail,
                  size_t size) {
    char text[256];
    buf_puts(b, head);
    for (size_t i = 0; b->len < size; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        buf_add(b, text, (size_t)snprintf(text, sizeof(text), unit, i, i));
#pragma GCC diagnostic pop
    }
    b->len--;
    buf_puts(b, tail);
}

static const char *in_scratch(const char *name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", scratch, name);
    return path;
}

/* In the page cache, without the fsync of file_write. */
static const char *file_put(const char *name, const struct buf *b) {
    const char *path = in_scratch(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->len, f), b->len);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* JSON */

static void json_good(const struct buf *b) {
    struct error err;
    json_t *v = json_parse(b->data, b->len, "text", &err);
    if (!v) fail_msg("%s", err.text);
    json_decref(v);
}

static void json_bad(const struct buf *b) {
    struct error err;
    assert_null(json_parse(b->data, b->len, "text", &err));
    assert_int_equal(err.code, ERR_FORMAT);
    (void)request_text_check(b->data, b->len, &err);
}

static void numbers(struct buf *b, size_t n) {
    repeat(b, "[", "1,", "]", n);
}
static void numbers_cut(struct buf *b, size_t n) {
    repeat(b, "[", "1,", ",", n);
}
static void texts(struct buf *b, size_t n) {
    repeat(b, "[", "\"the quick brown fox\",", "]", n);
}
static void texts_cut(struct buf *b, size_t n) {
    repeat(b, "{\"a\":[", "\"the quick brown fox\",", "", n);
}
static void lists(struct buf *b, size_t n) {
    repeat(b, "[", "[],", "]", n);
}
static void lists_cut(struct buf *b, size_t n) {
    repeat(b, "[", "[],", "", n);
}
static void objects(struct buf *b, size_t n) {
    repeat(b, "[", "{},", "]", n);
}
static void objects_cut(struct buf *b, size_t n) {
    repeat(b, "[", "{\"a\":{},\"b\":[]},", "x", n);
}
static void members(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":1,", "}", n);
}
static void members_cut(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":[1],", "", n);
}
static void members_twice(struct buf *b, size_t n) {
    count(b, "{", "\"%zu\":1,", ",\"0\":1}", n);
}
/* Each list grows its table after its first item, which contains all deeper lists. */
static void deep(struct buf *b, size_t n) {
    for (int i = 0; i < 1000; i++) buf_puts(b, "[");
    repeat(b, "", "1,", "", n / 2);
    for (int i = 0; i < 1000; i++) buf_puts(b, ",0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]");
}
static void long_text(struct buf *b, size_t n) {
    repeat(b, "[\"", "abcdefghijklmnopqrstuvwxyz", "\"]", n);
}
static void long_text_cut(struct buf *b, size_t n) {
    repeat(b, "[\"", "abcdefghijklmnopqrstuvwxyz", "", n);
}
static void escapes(struct buf *b, size_t n) {
    repeat(b, "[\"", "\\n\\u9b5a\\\"", "\"\"]", n);
}
static void brackets(struct buf *b, size_t n) {
    repeat(b, "", "[", "", n);
}

/* JSON files of many values */

static int value_count(void *ctx, const json_t *v, int line, struct error *err) {
    (void)v, (void)line, (void)err;
    ++*(size_t *)ctx;
    return OK;
}

static void each_good(const struct buf *b) {
    struct error err;
    size_t n = 0;
    if (json_file_each(file_put("each", b), value_count, &n, &err) != OK) fail_msg("%s", err.text);
    assert_true(n > b->len / 64);
}

static void each_bad(const struct buf *b) {
    struct error err;
    size_t n = 0;
    assert_int_equal(json_file_each(file_put("each", b), value_count, &n, &err), ERR_FORMAT);
}

static void rows(struct buf *b, size_t n) {
    repeat(b, "", "{\"messages\":[{\"role\":\"user\",\"x\":1}]}\n", "\n", n);
}
static void rows_cut(struct buf *b, size_t n) {
    repeat(b, "", "{\"messages\":[{\"role\":\"user\",\"x\":1}]}\n", "{", n);
}
static void rows_listed(struct buf *b, size_t n) {
    repeat(b, "[", "{\"role\":\"user\",\"x\":[\"]\"]},", "]", n);
}

/* YAML and settings files */

static int yaml_try(const struct buf *b, struct error *err) {
    struct yaml y;
    int rc = yaml_parse(&y, "text", b->data, b->len, err);
    if (rc == OK) yaml_release(&y);
    return rc;
}

static void yaml_good(const struct buf *b) {
    struct error err;
    if (yaml_try(b, &err) != OK) fail_msg("%s", err.text);
}

static void yaml_bad(const struct buf *b) {
    struct error err;
    assert_int_equal(yaml_try(b, &err), ERR_FORMAT);
}

static void yaml_map(struct buf *b, size_t n) {
    count(b, "", "key%zu: value\n", "\n", n);
}
static void yaml_maps(struct buf *b, size_t n) {
    count(b, "a:\n", " - {id: %zu, x: [1, 2]}\n", "\n", n);
}
static void yaml_list(struct buf *b, size_t n) {
    repeat(b, "", "- 1\n", "\n", n);
}
static void yaml_flow_cut(struct buf *b, size_t n) {
    repeat(b, "[", "a,", "", n);
}
static void yaml_twice(struct buf *b, size_t n) {
    count(b, "", "key%zu: value\n", "\nkey0: 1", n);
}
static void yaml_text(struct buf *b, size_t n) {
    repeat(b, "a: |\n", " the quick brown fox\n", "\n", n);
}
static void yaml_quoted(struct buf *b, size_t n) {
    repeat(b, "a: \"", "\\u9b5a ", "\"", n);
}
static void yaml_deep(struct buf *b, size_t n) {
    repeat(b, "", "- ", "", n);
}
static void yaml_brackets(struct buf *b, size_t n) {
    repeat(b, "", "[", "", n);
}
static void yaml_aliases(struct buf *b, size_t n) {
    buf_puts(b, "a: &a [x, x]\nb: &b [*a, *a]\n");
    repeat(b, "", "c: [*b, *b]\n", "\n", n);
}
static void yaml_comments(struct buf *b, size_t n) {
    repeat(b, "", "# a comment\n", "\na: 1", n);
}
static void yaml_long_key(struct buf *b, size_t n) {
    repeat(b, "? ", "k", "k\n: [1", n / 2);
    repeat(b, "", ",1", "1]", n);
}

static void config_good(const struct buf *b) {
    struct config_file c;
    struct error err;
    if (config_parse(&c, "c", b->data, b->len, &err) != OK) fail_msg("%s", err.text);
    config_release(&c);
}
static void config_bad(const struct buf *b) {
    struct config_file c;
    struct error err;
    assert_int_equal(config_parse(&c, "c", b->data, b->len, &err), ERR_USAGE);
}
static void config_keys(struct buf *b, size_t n) {
    count(b, "", "key%zu = value\n", "\n", n);
}
static void config_sections(struct buf *b, size_t n) {
    count(b, "", "[section%zu]\nkey = value\n", "\n", n);
}

/* files of questions and of training data */

static void csv_rows(struct buf *b, size_t n) {
    count(b, "", "%zu,\"two, 2\",b,c,d,A\n", "\n", n);
}
static void csv_cell(struct buf *b, size_t n) {
    repeat(b, "q,a,b,c,\"", "text \"\"quoted\"\"\n", "\",A\n", n);
}
static void csv_cell_cut(struct buf *b, size_t n) {
    repeat(b, "q,a,b,c,\"", "text,\n", "", n);
}
static void csv_columns(struct buf *b, size_t n) {
    count(b, "", "c%zu,", "\n", n / 2);
    repeat(b, "", "1,", "\n", n);
}

static int cells_count(void *ctx, const json_t *row, int line, struct error *err) {
    (void)line, (void)err;
    *(size_t *)ctx += json_object_size(row);
    return OK;
}
static void csv_any(const struct buf *b) {
    struct error err;
    size_t n = 0;
    csv_each(file_put("x.csv", b), cells_count, &n, &err);
}
static void csv_good(const struct buf *b) {
    struct error err;
    size_t n = 0;
    if (csv_each(file_put("x.csv", b), cells_count, &n, &err) != OK) fail_msg("%s", err.text);
    assert_true(n >= 3);
}

static void page_lines(struct buf *b, size_t n) {
    buf_puts(b, "process_cpu_seconds_total 1\nshoal_cpus 2\nprocess_resident_memory_bytes 1\n"
                "shoal_host_memory_bytes 2\nshoal_host_memory_available_bytes 1\n");
    count(b, "", "vllm:num_requests_waiting{model_name=\"%zu\"} 1\n", "", n);
}
static void page_label(struct buf *b, size_t n) {
    repeat(b, "vllm:num_requests_waiting{model_name=\"", "\\\"} ", "\n", n);
}
static void page_any(const struct buf *b) {
    struct metrics_sample s;
    struct error err;
    metrics_sample_parse(b->data, b->len, &s, &err);
}

static void training_run(const struct buf *b) {
    struct error err;
    struct dataset d;
    struct lint l;
    struct buf text = {0};
    struct tokenizer *t = tokenizer_new_bytes(259);
    if (dataset_load(&d, file_put("x.jsonl", b), NULL, t, 0, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(lint_dataset(&d, &d, &l, &err), OK);
    lint_text(&l, &text);
    assert_true(text.len > 0);
    buf_release(&text);
    dataset_release(&d);
    tokenizer_free(t);
}

static const char chat_row[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"question %zu\"},"
                               "{\"role\":\"assistant\",\"content\":\"answer %zu\"}]}\n";
static void chats(struct buf *b, size_t n) {
    count(b, "", chat_row, "\n", n);
}
static void chats_same(struct buf *b, size_t n) {
    repeat(b, "",
           "{\"messages\":[{\"role\":\"user\",\"content\":\"question\"},"
           "{\"role\":\"assistant\",\"content\":\"answer\"}]}\n",
           "\n", n);
}
static void chat_turns(struct buf *b, size_t n) {
    repeat(b, "{\"messages\":[",
           "{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"},",
           "]}\n", n);
}
static void chat_long(struct buf *b, size_t n) {
    repeat(b, "{\"text\":\"", "the quick brown fox. ", "\"}\n", n);
}

/* tokenizers */

static const char tokenizer_end[] =
    "],\"type\":\"BPE\"},\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
    "\"add_prefix_space\":false,\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\"},"
    "\"added_tokens\":[";

/* All words of up to four letters, the shorter first, until `n` bytes are full; the merge of each
 * follows from its halves. */
static void word_at(size_t i, char out[8]) {
    size_t len = 1, n = 26;
    while (i >= n) i -= n, n *= 26, len++;
    for (size_t k = len; k-- > 0; i /= 26) out[k] = (char)('a' + i % 26);
    out[len] = 0;
}

static void tokenizer_words(struct buf *b, size_t n) {
    char word[8];
    size_t total = MIN(n / 26, (size_t)26 * 27 * 27 * 27);
    buf_puts(b, "{\"model\":{\"vocab\":{");
    for (size_t i = 0; i < total; i++) {
        word_at(i, word);
        buf_printf(b, "%s\"%s\":%zu", i ? "," : "", word, i);
    }
    buf_puts(b, "},\"merges\":[");
    for (size_t i = 26; i < total; i++) {
        word_at(i, word);
        size_t half = strlen(word) / 2;
        buf_printf(b, "%s\"%.*s %s\"", i > 26 ? "," : "", (int)half, word, word + half);
    }
    buf_puts(b, tokenizer_end);
    buf_puts(b, "]}");
}
static void tokenizer_cut(struct buf *b, size_t n) {
    tokenizer_words(b, n);
    b->len = b->len * 2 / 3;
}
static void tokenizer_added(struct buf *b, size_t n) {
    buf_puts(b, "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[");
    buf_puts(b, tokenizer_end);
    for (size_t i = 1; b->len < n; i++)
        buf_printf(b, "%s{\"id\":%zu,\"content\":\"<unused%zu>\",\"special\":true}",
                   i > 1 ? "," : "", i, i);
    buf_puts(b, "]}");
}

static void tokenizer_good(const struct buf *b) {
    struct error err;
    struct tokenizer *t = tokenizer_from_json(file_put("tokenizer.json", b), &err);
    if (!t) fail_msg("%s", err.text);
    tokenizer_free(t);
}
static void tokenizer_bad(const struct buf *b) {
    struct error err;
    assert_null(tokenizer_from_json(file_put("tokenizer.json", b), &err));
    assert_int_equal(err.code, ERR_FORMAT);
}

/* Byte-level with this pattern; 500 added tokens begin with "<". */
static struct tokenizer *bpe_new(const char *pre) {
    static const char corpus[] =
        "the cat and the dog, aaaaaaaaaaaaaaaaaaaa AAAA      \n\n\n 今日は、 "
        "the the 12345 the thethethe ........ <<<<<<<<";
    static char names[500][16];
    static const char *specials[500];
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        snprintf(names[i], sizeof(names[i]), "<unused%zu>", i);
        specials[i] = names[i];
    }
    struct tokenizer *t = tokenizer_train_bpe(corpus, sizeof corpus - 1, 800, pre, specials,
                                              ARRAY_LEN(specials), ARRAY_LEN(specials), &err);
    if (!t) fail_msg("%s", err.text);
    return t;
}

/* SentencePiece's two kinds: bytes, letters, and a few pieces of several. */
static struct tokenizer *pieces_new(enum tokenizer_kind kind, const char *normalizer) {
    static const char *const words[] = {"<unk>",
                                        METASPACE_CHAR,
                                        "a",
                                        "b",
                                        "aa",
                                        "aaaa",
                                        METASPACE_CHAR "a",
                                        METASPACE_CHAR METASPACE_CHAR,
                                        "ab",
                                        "ba",
                                        "abab",
                                        METASPACE_CHAR "the",
                                        "t",
                                        "h",
                                        "e",
                                        "th"};
    enum { BYTES = 256, N = BYTES + ARRAY_LEN(words) };
    static char bytes[BYTES][16];
    const char *pieces[N];
    int32_t lens[N];
    float scores[N];
    uint8_t types[N];
    for (int i = 0; i < N; i++) {
        int byte = i - (int)ARRAY_LEN(words);
        if (byte >= 0) snprintf(bytes[byte], sizeof(bytes[byte]), "<0x%02X>", (unsigned)byte);
        pieces[i] = byte >= 0 ? bytes[byte] : words[i];
        lens[i] = (int32_t)strlen(pieces[i]);
        scores[i] = -(float)i;
        types[i] = byte >= 0 ? PIECE_BYTE : i == 0 ? PIECE_UNKNOWN : PIECE_NORMAL;
    }
    struct tokenizer_spec spec = {.kind = kind,
                                  .n = N,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .scores = scores,
                                  .types = types,
                                  .bos = -1,
                                  .eos = -1,
                                  .unk = 0,
                                  .add_space_prefix = true,
                                  .pre = PREFIX_ALWAYS,
                                  .normalizer = normalizer};
    struct error err;
    struct tokenizer *t = tokenizer_new(&spec, &err);
    if (!t) fail_msg("%s", err.text);
    return t;
}

static void encode(const struct tokenizer *t, const struct buf *b) {
    struct token_ids ids = {0};
    tokenizer_encode(t, b->data, b->len, TOKENIZER_PARSE_SPECIAL, &ids);
    assert_true(ids.n > 0);
    token_ids_release(&ids);
}

static struct tokenizer *tokenizers[8];
static void tokenizers_make(void) {
    static const char *const pres[] = {"gpt-2", "llama-bpe", "gpt-4o", "smollm"};
    for (size_t i = 0; i < ARRAY_LEN(pres); i++) tokenizers[i] = bpe_new(pres[i]);
    tokenizers[4] = pieces_new(TOKENIZER_SPM, NULL);
    tokenizers[5] = pieces_new(TOKENIZER_UNIGRAM, NULL);
    char *spaces = normalizer_from_sentencepiece(NULL, 0, true);
    tokenizers[6] = pieces_new(TOKENIZER_UNIGRAM, spaces);
    free(spaces);
}
static void tokenizers_free(void) {
    for (size_t i = 0; i < ARRAY_LEN(tokenizers); i++) tokenizer_free(tokenizers[i]);
}
static void encode_gpt2(const struct buf *b) {
    encode(tokenizers[0], b);
}
static void encode_llama3(const struct buf *b) {
    encode(tokenizers[1], b);
}
static void encode_gpt4o(const struct buf *b) {
    encode(tokenizers[2], b);
}
static void encode_smollm(const struct buf *b) {
    encode(tokenizers[3], b);
}
static void encode_spm(const struct buf *b) {
    encode(tokenizers[4], b);
}
static void encode_unigram(const struct buf *b) {
    encode(tokenizers[5], b);
}
static void encode_spaces(const struct buf *b) {
    encode(tokenizers[6], b);
}

static void text_word(struct buf *b, size_t n) {
    repeat(b, "", "a", "b", n);
}
static void text_mixed(struct buf *b, size_t n) {
    repeat(b, "", "abaABAA", "b", n);
}
static void text_blank(struct buf *b, size_t n) {
    repeat(b, "", " ", "b", n);
}
static void text_lines(struct buf *b, size_t n) {
    repeat(b, "", " \n\t", "b", n);
}
static void text_gaps(struct buf *b, size_t n) {
    repeat(b, "", "a  ", "b", n);
}
static void text_digits(struct buf *b, size_t n) {
    repeat(b, "", "1", "b", n);
}
static void text_marks(struct buf *b, size_t n) {
    repeat(b, "", "<", "b", n);
}
static void text_han(struct buf *b, size_t n) {
    repeat(b, "", "日本語", "\xAA!", n); /* repeat() takes the last byte */
}
static void text_bytes(struct buf *b, size_t n) {
    repeat(b, "", "\xFF\xC3\xE3\x81", "b", n);
}
static void text_combining(struct buf *b, size_t n) {
    repeat(b, "a", "\xCC\x81\xCC\x96", "\x96", n); /* classes 230 and 220 */
}
static void text_words(struct buf *b, size_t n) {
    count(b, "", "word%zu and the cat, ", "b", n);
}

static void norm_run(const char *json, const struct buf *b) {
    struct error err;
    struct buf out = {0}, room = {0};
    struct normalizer *n = normalizer_new(json, &err);
    if (!n) fail_msg("%s", err.text);
    normalizer_apply(n, b->data, b->len, &out, &room);
    normalizer_free(n);
    buf_release(&out);
    buf_release(&room);
}
static void norm_nfc(const struct buf *b) {
    norm_run("{\"type\":\"NFC\"}", b);
}
static void norm_nfkd(const struct buf *b) {
    norm_run("{\"type\":\"NFKD\"}", b);
}
static void norm_replace(const struct buf *b) {
    norm_run("{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"__\"}", b);
}
static void norm_regex(const struct buf *b) {
    norm_run("{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s+\"},\"content\":\" \"}", b);
}
static void norm_strip(const struct buf *b) {
    norm_run("{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":true}", b);
}

/* files of tensors */

static void with_length(struct buf *b, const struct buf *header) {
    uint64_t length = header->len;
    buf_add(b, &length, sizeof(length));
    buf_add(b, header->data, header->len);
}
static void safetensors_many(struct buf *b, size_t n) {
    struct buf header = {0};
    count(&header, "{", "\"layer.%zu\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},",
          "}", n);
    with_length(b, &header);
    buf_release(&header);
}
static void safetensors_metadata(struct buf *b, size_t n) {
    struct buf header = {0};
    count(&header, "{\"__metadata__\":{", "\"%zu\":\"x\",", "}}", n);
    with_length(b, &header);
    buf_release(&header);
}
static void safetensors_run(const struct buf *b) {
    struct error err;
    struct safetensors st;
    if (safetensors_open(&st, file_put("x.safetensors", b), &err) != OK) fail_msg("%s", err.text);
    safetensors_close(&st);
}

static void u64_add(struct buf *b, uint64_t v) {
    buf_add(b, &v, 8);
}
static void u32_add(struct buf *b, uint32_t v) {
    buf_add(b, &v, 4);
}
static void name_add(struct buf *b, const char *name) {
    u64_add(b, strlen(name));
    buf_puts(b, name);
}
static void gguf_keys(struct buf *b, size_t n) {
    char name[32];
    size_t keys = n / 40;
    buf_puts(b, "GGUF");
    u32_add(b, 3);
    u64_add(b, 0);
    u64_add(b, keys);
    for (size_t i = 0; i < keys; i++) {
        snprintf(name, sizeof(name), "key.%zu", i * 7919 % keys);
        name_add(b, name);
        u32_add(b, 8);
        name_add(b, "a value");
    }
}
static void gguf_keys_same(struct buf *b, size_t n) {
    gguf_keys(b, n);
    memcpy(b->data + 24 + 8, "key.1", 5);
}
static void gguf_tensors(struct buf *b, size_t n) {
    char name[32];
    size_t tensors = n / 60;
    buf_puts(b, "GGUF");
    u32_add(b, 3);
    u64_add(b, tensors);
    u64_add(b, 0);
    for (size_t i = 0; i < tensors; i++) {
        snprintf(name, sizeof(name), "blk.%zu.weight", i);
        name_add(b, name);
        u32_add(b, 1);
        u64_add(b, 8);
        u32_add(b, 0);
        u64_add(b, 32 * i);
    }
    size_t data = tensors * 32 + 64;
    struct error err;
    assert_int_equal(buf_reserve(b, data, &err), OK);
    b->len = (b->len + 31) / 32 * 32;
    memset(b->data + b->len, 0, tensors * 32);
    b->len += tensors * 32;
}
static void gguf_run(const struct buf *b) {
    struct error err;
    assert_null(model_open(file_put("x.gguf", b), NUMERIC_EXACT, &err)); /* not a model */
}

/* texts of users and of models */

static void clean_run(const struct buf *b) {
    struct buf out = {0};
    buf_add_sanitized(&out, b->data, b->len);
    buf_release(&out);
}
static void page_run(const struct buf *b) {
    struct buf out = {0};
    html_escape(&out, b->data);
    buf_release(&out);
}
static void whole_run(const struct buf *b) {
    size_t whole = 0;
    for (size_t i = 0; i < b->len; i += 16)
        whole += utf8_complete_len(b->data + i, MIN(b->len - i, (size_t)16));
    assert_true(whole <= b->len);
}
static void columns_run(const struct buf *b) {
    assert_true(utf8_field_width(b->data, 40) >= 0);
}
static void escapes_html(struct buf *b, size_t n) {
    repeat(b, "", "<a href=\"&\">'", "x", n);
}
static void html_tags(struct buf *b, size_t n) {
    repeat(b, "<html><body>", "<p>some <b>text</b> &amp; more</p>\n", "\n", n);
}
static void html_open(struct buf *b, size_t n) {
    repeat(b, "", "<", "x", n);
}
static void html_nested(struct buf *b, size_t n) {
    repeat(b, "", "<ul><li><div>", ">x", n);
}
static void html_comments(struct buf *b, size_t n) {
    repeat(b, "", "<!-- ", " x", n);
}
static void html_scripts(struct buf *b, size_t n) {
    repeat(b, "", "<script>", "x", n);
}
static void html_attributes(struct buf *b, size_t n) {
    repeat(b, "<p ", "a=\"", "x", n);
}
static void html_entities(struct buf *b, size_t n) {
    repeat(b, "", "&#x41;&amp", "x", n);
}
static void html_titles(struct buf *b, size_t n) {
    repeat(b, "", "<title>", "x", n);
}
static void markdown_lines(struct buf *b, size_t n) {
    count(b, "# Title\n", "## Heading %zu\n\nSome *text* and `code`, [a link](http://x).\n\n", "x",
          n);
}
static void markdown_brackets(struct buf *b, size_t n) {
    repeat(b, "", "[", "x", n);
}
static void markdown_stars(struct buf *b, size_t n) {
    repeat(b, "", "**a_", "x", n);
}
static void markdown_fences(struct buf *b, size_t n) {
    repeat(b, "", "```\n", "x", n);
}
static void markdown_ticks(struct buf *b, size_t n) {
    for (size_t i = 1; b->len < n; i = i % 500 + 1) {
        for (size_t k = 0; k < i; k++) buf_puts(b, "`");
        buf_puts(b, " ");
    }
}
static void document_run(const struct buf *b) {
    int (*const readers[])(const char *, size_t, struct buf *, struct buf *,
                           struct error *) = {document_read_html, document_read_markdown};
    for (size_t i = 0; i < ARRAY_LEN(readers); i++) {
        struct error err;
        struct buf title = {0}, text = {0}, terms = {0};
        struct text_chunk *v = NULL;
        int64_t n;
        buf_puts(&text, "");
        if (readers[i](b->data, b->len, &title, &text, &err) == OK) {
            text_split_chunks(text.data, text.len, 1000, &v);
            assert_int_equal(terms_index(text.data, text.len, &terms, &n, &err), OK);
        }
        free(v);
        buf_release(&title);
        buf_release(&text);
        buf_release(&terms);
    }
}

static void said_run(const struct buf *b) {
    fuzz_target_find("rules")->run((const uint8_t *)b->data, b->len);
}
static void said_names(struct buf *b, size_t n) {
    repeat(b, "", "my name is Ada. I like tea. ", " x", n);
}
static void said_thoughts(struct buf *b, size_t n) {
    repeat(b, "", "<think> hm ", " x", n);
}
static void said_japanese(struct buf *b, size_t n) {
    repeat(b, "", "私の名前は花です。好きなのは", "\x81\xA7", n);
}

static void grade_run(const struct buf *b) {
    struct buf form = {0};
    for (int i = 0; grader_at(i); i++) {
        form.len = 0;
        grader_extract(grader_at(i), b->data, &form);
        grader_equivalent(grader_at(i), b->data, "12");
    }
    buf_release(&form);
}
static void answers_many(struct buf *b, size_t n) {
    count(b, "", "The answer is %zu. ", "x", n);
}
static void answers_boxed(struct buf *b, size_t n) {
    repeat(b, "", "\\boxed{", "x", n);
}
static void answers_sum(struct buf *b, size_t n) {
    repeat(b, "answer: 1", "+1", "+1", n);
}
static void answers_parens(struct buf *b, size_t n) {
    repeat(b, "answer: ", "(", "x", n);
}
static void answers_fractions(struct buf *b, size_t n) {
    repeat(b, "answer: ", "\\frac{1}{", "2", n);
}
static void answers_digits(struct buf *b, size_t n) {
    repeat(b, "answer: ", "1", "2", n);
}
static void answers_names(struct buf *b, size_t n) {
    count(b, "answer: ", "x_%zu+", "x", n);
}

/* logs and lists */

/* The agents do not move until they die. */
static void trace_many(struct buf *b, size_t n) {
    static struct world w;
    struct world_rules rules;
    struct error err;
    char hash[HASH_LEN];
    assert_int_equal(world_rules_load(&rules, "repaired", &err), OK);
    world_reset(&w, &rules, 2, 3);
    buf_puts(b, "{\"shoal_world\":1,\"rules\":{\"rules\":\"repaired\"},\"agents\":2,\"seed\":3,"
                "\"steps\":1000000,\"policy\":\"x\"}\n");
    while (b->len < n) {
        int16_t actions[2];
        for (int i = 0; i < 2; i++) actions[i] = w.agents[i].alive ? 0 : -1;
        world_step(&w, &rules, actions);
        buf_printf(b, "{\"tick\":%d,\"actions\":[%d,%d]", w.tick, actions[0], actions[1]);
        world_hash(&w, hash);
        if (w.tick % TRACE_HASH_INTERVAL == 0) buf_printf(b, ",\"hash\":\"%s\"", hash);
        buf_puts(b, "}\n");
    }
    world_rules_release(&rules);
}
static void trace_run(const struct buf *b) {
    struct error err;
    struct trace t;
    if (trace_parse(&t, "trace", b->data, b->len, &err) != OK) fail_msg("%s", err.text);
    trace_release(&t);
}

/* One candidate per generation, of which the last one descends. */
static void lineage_many(struct buf *b, size_t n) {
    for (size_t i = 0; b->len < n; i++) {
        buf_printf(b, "{\"generation\":%zu,\"candidates\":[{\"name\":\"c%zu\",", i, i);
        buf_puts(b, "\"fitness\":{\"value\":1},\"parents\":[");
        if (i) buf_printf(b, "\"c%zu\"", i - 1);
        buf_puts(b, "]}]}\n");
    }
}
static void lineage_run(const struct buf *b) {
    struct error err;
    json_t *v = lineage_load(file_put("evolution.jsonl", b), &err);
    if (!v) fail_msg("%s", err.text);
    json_decref(v);
}

static void board_run(const struct buf *b) {
    struct error err;
    json_t *events = json_parse(b->data, b->len, "log", &err);
    if (!events) fail_msg("%s", err.text);
    struct store *s = store_open(":memory:", &err);
    assert_int_equal(store_log_append(s, "log", 1, events, &err), OK);
    struct blackboard_options o = {.store = s, .name = "log"};
    struct blackboard *board = blackboard_open(&o, &err);
    if (!board) fail_msg("%s", err.text);
    blackboard_close(board);
    store_close(s);
    json_decref(events);
}
static void board_writes(struct buf *b, size_t n) {
    count(b, "[",
          "{\"op\":\"write\",\"timestamp\":%zu,\"key\":\"key%zu\",\"value\":[1,\"x\"],\"priority\":"
          "1},",
          "]", n);
}

static void listing_run(const struct buf *b) {
    struct error err;
    struct hub_repo r;
    json_t *v = json_parse(b->data, b->len, "listing", &err);
    if (!v) fail_msg("%s", err.text);
    if (hub_repo_parse(v, &r, &err) != OK) fail_msg("%s", err.text);
    hub_repo_release(&r);
    json_decref(v);
}
static void listing_files(struct buf *b, size_t n) {
    count(b, "{\"sha\":\"0123456789abcdef0123456789abcdef01234567\",\"siblings\":[",
          "{\"rfilename\":\"folder/file%zu.json\",\"size\":1,"
          "\"blobId\":\"0123456789abcdef0123456789abcdef01234567\"},",
          "]}", n);
}

/* adapters and grammars */

static void peft_run(const struct buf *b) {
    struct error err;
    struct model_config shape = shape_small();
    static const char dir[] = "peft";
    assert_int_equal(dir_make(in_scratch(dir), &err), OK);
    file_put("peft/adapter_config.json", b);
    struct buf none = {0};
    buf_add(&none, "\2\0\0\0\0\0\0\0{}", 10);
    file_put("peft/adapter_model.safetensors", &none);
    buf_release(&none);
    struct adapter *a = adapter_load(in_scratch(dir), &shape, &err);
    assert_true(!a);
}
static void peft_targets(struct buf *b, size_t n) {
    count(b, "{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"target_modules\":[",
          "\"q_proj%zu\",", "]}", n);
}
static void peft_patterns(struct buf *b, size_t n) {
    count(b,
          "{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"target_modules\":[\"q_proj\"],"
          "\"rank_pattern\":{",
          "\"layers.%zu.q_proj\":2,", "}}", n);
}

static void gbnf_run(const struct buf *b) {
    struct error err;
    grammar_free(grammar_new_gbnf(b->data, b->len, &err));
}
static void regex_run(const struct buf *b) {
    struct error err;
    grammar_free(grammar_new_regex(b->data, b->len, &err));
}
static void schema_run(const struct buf *b) {
    struct error err;
    grammar_free(grammar_new_json_schema(b->data, b->len, true, &err));
}
static void gbnf_words(struct buf *b, size_t n) {
    count(b, "root ::= ", "\"word%zu\" | ", "\"x\"", n);
    b->data[b->len - 4] = ' ';
}
static void regex_words(struct buf *b, size_t n) {
    count(b, "(", "word%zu|", ")", n);
}
static void regex_counts(struct buf *b, size_t n) {
    repeat(b, "", "a{1,9}", "}", n);
}
static void schema_enum(struct buf *b, size_t n) {
    count(b, "{\"enum\":[", "\"value%zu\",", "]}", n);
}
static void schema_properties(struct buf *b, size_t n) {
    count(b, "{\"type\":\"object\",\"properties\":{", "\"p%zu\":{\"type\":\"string\"},", "}}", n);
}
static void schema_definitions(struct buf *b, size_t n) {
    count(b, "{\"$defs\":{",
          "\"d%zu\":{\"anyOf\":[{\"$ref\":\"#/$defs/d0\"},{\"type\":\"null\"}]},",
          "},\"$ref\":\"#/$defs/d1\"}", n);
}

/* A reply of tool calls, decoded 32 tokens of one byte at a time. */
static void calls_run(const struct buf *b) {
    struct generation g = {
        .s = server_small(),
        .spec = {.tool_choice = TOOL_CHOICE_AUTO, .tool_form = tool_form_find(NULL)}};
    struct completion a = {0};
    int32_t n = (int32_t)b->len, *out = xcalloc(b->len, sizeof *out);
    for (int32_t i = 0; i < n; i++) out[i] = g.s->model->tok->byte_ids[(uint8_t)b->data[i]];
    a.batch_request.request.out = out;
    for (int32_t seen = 0; !a.done;) {
        seen = MIN(seen + 32, n);
        a.batch_request.request.n_out = a.batch_request.n_visible = seen;
        a.batch_request.done = seen == n;
        completion_advance(&g, &a);
    }
    assert_true((size_t)a.n_tool_calls > b->len / 100 &&
                a.tool_calls[a.n_tool_calls - 1].args_end > b->len - 100);
    completion_release(&a);
}
/* A reply that is all reasoning, decoded one token of one byte at a time. */
static void reasoning_run(const struct buf *b) {
    struct generation g = {.s = server_small(), .spec = {.reasoning = true}};
    struct completion a = {.reasoning_state = REASONING_BEFORE};
    int32_t n = (int32_t)b->len, *out = xcalloc(b->len, sizeof *out);
    for (int32_t i = 0; i < n; i++) out[i] = g.s->model->tok->byte_ids[(uint8_t)b->data[i]];
    a.batch_request.request.out = out;
    for (int32_t seen = 0; !a.done;) {
        seen++;
        a.batch_request.request.n_out = a.batch_request.n_visible = seen;
        a.batch_request.done = seen == n;
        completion_advance(&g, &a);
    }
    assert_true(a.reasoning_state == REASONING_OPEN && a.content_begin == b->len);
    completion_release(&a);
}
static void blanks_think(struct buf *b, size_t n) {
    repeat(b, "", "\n", "<think>", n);
}
static void newlines_thought(struct buf *b, size_t n) {
    repeat(b, "<think>", "\n", "", n);
}
static void tags_cut(struct buf *b, size_t n) {
    repeat(b, "<think>", "</think\n", "", n);
}
static void calls_many(struct buf *b, size_t n) {
    repeat(b, "", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>\n", "", n);
}

static const struct scale scales[] = {
    {"JSON: numbers", MB / 4, 8 * MB, numbers, json_good},
    {"JSON: numbers, cut", MB / 4, 8 * MB, numbers_cut, json_bad},
    {"JSON: texts", MB, 32 * MB, texts, json_good},
    {"JSON: texts, cut", MB, 32 * MB, texts_cut, json_bad},
    {"JSON: lists", MB / 8, 4 * MB, lists, json_good},
    {"JSON: lists, cut", MB / 8, 4 * MB, lists_cut, json_bad},
    {"JSON: objects", MB / 8, 4 * MB, objects, json_good},
    {"JSON: objects, cut", MB / 8, 4 * MB, objects_cut, json_bad},
    {"JSON: members", MB, 8 * MB, members, json_good},
    {"JSON: members, cut", MB, 8 * MB, members_cut, json_bad},
    {"JSON: a member twice", MB, 8 * MB, members_twice, json_bad},
    {"JSON: deep", MB / 4, 8 * MB, deep, json_good},
    {"JSON: one text", MB, 32 * MB, long_text, json_good},
    {"JSON: one text, cut", MB, 32 * MB, long_text_cut, json_bad},
    {"JSON: escapes", MB, 32 * MB, escapes, json_good},
    {"JSON: brackets", MB, 32 * MB, brackets, json_bad},
    {"JSON lines", MB, 32 * MB, rows, each_good},
    {"JSON lines, cut", MB, 32 * MB, rows_cut, each_bad},
    {"JSON lines in a list", MB, 32 * MB, rows_listed, each_good},
    {"YAML: keys", MB / 8, 8 * MB, yaml_map, yaml_good},
    {"YAML: maps", MB / 8, 8 * MB, yaml_maps, yaml_good},
    {"YAML: list", MB / 8, 4 * MB, yaml_list, yaml_good},
    {"YAML: list, cut", MB / 8, 4 * MB, yaml_flow_cut, yaml_bad},
    {"YAML: a key twice", MB / 8, 8 * MB, yaml_twice, yaml_bad},
    {"YAML: text", MB / 4, 8 * MB, yaml_text, yaml_good},
    {"YAML: quoted", MB / 4, 8 * MB, yaml_quoted, yaml_good},
    {"YAML: deep", MB / 8, 8 * MB, yaml_deep, yaml_bad},
    {"YAML: brackets", MB / 8, 8 * MB, yaml_brackets, yaml_bad},
    {"YAML: aliases", MB / 8, 8 * MB, yaml_aliases, yaml_bad},
    {"YAML: comments", MB / 8, 8 * MB, yaml_comments, yaml_good},
    {"YAML: long key", 64 * KB, 8 * MB, yaml_long_key, yaml_bad},
    {"settings: keys", 64 * KB, MB / 2, config_keys, config_good},
    {"settings: sections", 64 * KB, MB / 2, config_sections, config_bad},
    {"CSV: rows", MB / 4, 32 * MB, csv_rows, csv_good},
    {"CSV: one cell", MB / 4, 32 * MB, csv_cell, csv_good},
    {"CSV: one cell, cut", MB / 4, 32 * MB, csv_cell_cut, csv_any},
    {"CSV: columns", 32 * KB, 4 * MB, csv_columns, csv_any},
    {"metrics page: lines", MB, 8 * MB, page_lines, page_any},
    {"metrics page: one label", MB, 8 * MB, page_label, page_any},
    {"training data: rows", MB / 8, 8 * MB, chats, training_run},
    {"training data: equal rows", MB / 8, 8 * MB, chats_same, training_run},
    {"training data: turns", 16 * KB, 128 * KB, chat_turns, training_run},
    {"training data: one text", MB / 8, 8 * MB, chat_long, training_run},
    {"tokenizer.json: words", MB, 8 * MB, tokenizer_words, tokenizer_good},
    {"tokenizer.json: cut", MB, 8 * MB, tokenizer_cut, tokenizer_bad},
    {"tokenizer.json: added", MB / 16, 8 * MB, tokenizer_added, tokenizer_good},
    {"encode gpt-2: a word", MB / 8, 2 * MB, text_word, encode_gpt2},
    {"encode gpt-2: blank", MB / 8, 2 * MB, text_blank, encode_gpt2},
    {"encode gpt-2: lines", MB / 8, 2 * MB, text_lines, encode_gpt2},
    {"encode gpt-2: digits", MB / 8, 2 * MB, text_digits, encode_gpt2},
    {"encode gpt-2: <", MB / 8, 2 * MB, text_marks, encode_gpt2},
    {"encode gpt-2: no text", MB / 8, 2 * MB, text_bytes, encode_gpt2},
    {"encode gpt-2: words", MB / 8, 2 * MB, text_words, encode_gpt2},
    {"encode llama-3: a word", MB / 8, 2 * MB, text_word, encode_llama3},
    {"encode llama-3: blank", MB / 8, 2 * MB, text_blank, encode_llama3},
    {"encode llama-3: lines", MB / 8, 2 * MB, text_lines, encode_llama3},
    {"encode llama-3: Han", MB / 8, 2 * MB, text_han, encode_llama3},
    {"encode gpt-4o: mixed", MB / 8, 2 * MB, text_mixed, encode_gpt4o},
    {"encode gpt-4o: blank", MB / 8, 2 * MB, text_blank, encode_gpt4o},
    {"encode gpt-4o: Han", MB / 8, 2 * MB, text_han, encode_gpt4o},
    {"encode gpt-4o: combining", MB / 8, 2 * MB, text_combining, encode_gpt4o},
    {"encode smollm: blank", MB / 8, 2 * MB, text_blank, encode_smollm},
    {"encode smollm: digits", MB / 8, 2 * MB, text_digits, encode_smollm},
    {"encode spm: a word", MB / 8, 2 * MB, text_word, encode_spm},
    {"encode spm: blank", MB / 8, 2 * MB, text_blank, encode_spm},
    {"encode spm: Han", MB / 8, 2 * MB, text_han, encode_spm},
    {"encode spm: words", MB / 8, 2 * MB, text_words, encode_spm},
    {"encode unigram: a word", MB / 8, 2 * MB, text_word, encode_unigram},
    {"encode unigram: mixed", MB / 8, 2 * MB, text_mixed, encode_unigram},
    {"encode unigram: blank", MB / 8, 2 * MB, text_blank, encode_unigram},
    {"encode unigram: Han", MB / 8, 2 * MB, text_han, encode_unigram},
    {"encode one space: blank", MB / 8, 2 * MB, text_blank, encode_spaces},
    {"encode one space: gaps", MB / 8, 2 * MB, text_gaps, encode_spaces},
    {"normalizer NFC: combining", MB / 8, 8 * MB, text_combining, norm_nfc},
    {"normalizer NFC: Han", MB / 8, 8 * MB, text_han, norm_nfc},
    {"normalizer NFKD: combining", MB / 8, 8 * MB, text_combining, norm_nfkd},
    {"normalizer replace: blank", MB / 8, 8 * MB, text_blank, norm_replace},
    {"normalizer regex: gaps", MB / 8, 8 * MB, text_gaps, norm_regex},
    {"normalizer regex: no text", MB / 8, 8 * MB, text_bytes, norm_regex},
    {"normalizer strip: blank", MB / 8, 8 * MB, text_blank, norm_strip},
    {"safetensors: tensors", MB / 4, 8 * MB, safetensors_many, safetensors_run},
    {"safetensors: metadata", MB / 4, 8 * MB, safetensors_metadata, safetensors_run},
    {"GGUF: keys", MB, 8 * MB, gguf_keys, gguf_run},
    {"GGUF: a key twice", MB, 8 * MB, gguf_keys_same, gguf_run},
    {"GGUF: tensors", MB / 4, 8 * MB, gguf_tensors, gguf_run},
    {"clean text: no text", MB, 8 * MB, text_bytes, clean_run},
    {"clean text: Han", MB, 8 * MB, text_han, clean_run},
    {"page: markup", MB, 8 * MB, escapes_html, page_run},
    {"page: no text", MB, 8 * MB, text_bytes, page_run},
    {"whole characters", MB, 8 * MB, text_han, whole_run},
    {"columns", MB, 8 * MB, text_han, columns_run},
    {"document: HTML", MB / 8, 8 * MB, html_tags, document_run},
    {"document: <", MB / 8, 8 * MB, html_open, document_run},
    {"document: nested", MB / 8, 8 * MB, html_nested, document_run},
    {"document: comments", MB / 8, 8 * MB, html_comments, document_run},
    {"document: scripts", MB / 8, 8 * MB, html_scripts, document_run},
    {"document: attributes", MB / 8, 8 * MB, html_attributes, document_run},
    {"document: entities", MB / 8, 8 * MB, html_entities, document_run},
    {"document: titles", MB / 8, 8 * MB, html_titles, document_run},
    {"document: Markdown", MB / 8, 8 * MB, markdown_lines, document_run},
    {"document: [", MB / 8, 8 * MB, markdown_brackets, document_run},
    {"document: **", MB / 8, 8 * MB, markdown_stars, document_run},
    {"document: fences", MB / 8, 8 * MB, markdown_fences, document_run},
    {"document: ticks", MB / 8, 8 * MB, markdown_ticks, document_run},
    {"document: a word", MB / 8, 8 * MB, text_word, document_run},
    {"document: blank", MB / 8, 8 * MB, text_blank, document_run},
    {"document: Han", MB / 8, 8 * MB, text_han, document_run},
    {"document: combining", MB / 8, 8 * MB, text_combining, document_run},
    {"said: names", 32 * KB, 2 * MB, said_names, said_run},
    {"said: thoughts", 32 * KB, 2 * MB, said_thoughts, said_run},
    {"said: Japanese", 32 * KB, 2 * MB, said_japanese, said_run},
    {"said: a word", 32 * KB, 2 * MB, text_word, said_run},
    {"said: blank", 32 * KB, 2 * MB, text_blank, said_run},
    {"graders: answers", 32 * KB, 2 * MB, answers_many, grade_run},
    {"graders: boxes", 32 * KB, 2 * MB, answers_boxed, grade_run},
    {"graders: a sum", 32 * KB, 2 * MB, answers_sum, grade_run},
    {"graders: (", 32 * KB, 2 * MB, answers_parens, grade_run},
    {"graders: fractions", 32 * KB, 2 * MB, answers_fractions, grade_run},
    {"graders: digits", 32 * KB, 2 * MB, answers_digits, grade_run},
    {"graders: names", 32 * KB, 2 * MB, answers_names, grade_run},
    {"graders: a word", 32 * KB, 2 * MB, text_word, grade_run},
    {"graders: blank", 32 * KB, 2 * MB, text_blank, grade_run},
    {"trace", MB / 8, 8 * MB, trace_many, trace_run},
    {"lineage", MB / 8, 8 * MB, lineage_many, lineage_run},
    {"blackboard", MB / 8, 8 * MB, board_writes, board_run},
    {"hub listing", MB / 8, 8 * MB, listing_files, listing_run},
    {"tool calls of a reply", 32 * KB, 2 * MB, calls_many, calls_run},
    {"reasoning: white space before it", 32 * KB, 2 * MB, blanks_think, reasoning_run},
    {"reasoning: newlines", 32 * KB, 2 * MB, newlines_thought, reasoning_run},
    {"reasoning: parts of tags", 32 * KB, 2 * MB, tags_cut, reasoning_run},
    {"PEFT: targets", MB / 16, 8 * MB, peft_targets, peft_run},
    {"PEFT: patterns", MB / 16, 8 * MB, peft_patterns, peft_run},
    {"GBNF: words", 16 * KB, 256 * KB, gbnf_words, gbnf_run},
    {"regex: words", 16 * KB, 256 * KB, regex_words, regex_run},
    {"regex: counts", 16 * KB, 256 * KB, regex_counts, regex_run},
    {"JSON schema: enum", 16 * KB, 256 * KB, schema_enum, schema_run},
    {"JSON schema: properties", 16 * KB, 256 * KB, schema_properties, schema_run},
    {"JSON schema: definitions", 16 * KB, 256 * KB, schema_definitions, schema_run},
};

/* measuring */

struct point {
    size_t size;
    double seconds; /* the minimum of the runs */
};

static double clock_used(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void point_run(const struct scale *s, struct point *p) {
    struct buf b = {0};
    s->make(&b, p->size);
    double start = clock_used();
    s->run(&b);
    p->seconds = fmin(p->seconds, clock_used() - start);
    buf_release(&b);
    if (p->seconds > SLOW_SECONDS)
        fail_msg("%s: %zu KB take %.1f s", s->name, p->size / KB, p->seconds);
}

static double per_byte(const struct point *p) {
    return fmax(p->seconds, TICK_SECONDS) / (double)p->size;
}

/* The ratio of the time per byte at the worst size to that at the best smaller one. */
static double ratio_of(const struct point *v, int n, int *worst) {
    double least = INFINITY, ratio = 0;
    for (int i = 0; i < n; i++) {
        least = fmin(least, per_byte(&v[i]));
        if (per_byte(&v[i]) / least > ratio) ratio = per_byte(&v[i]) / least, *worst = i;
    }
    return ratio;
}

static int points_run(const struct scale *s, struct point *v) {
    int n = 0;
    for (size_t size = s->first / SHRINK; size <= s->top / SHRINK && n < SIZES; size *= 2) {
        v[n] = (struct point){size, INFINITY};
        point_run(s, &v[n]);
        if (v[n++].seconds > STEP_SECONDS && n >= LEAST_SIZES) break;
    }
    return n;
}

static void points_show(const struct scale *s, const struct point *v, int n, double ratio) {
    printf("%-28s %5.2f:", s->name, ratio);
    for (int i = 0; i < n; i++) printf(" %zuK %.0f", v[i].size / KB, 1e9 * per_byte(&v[i]));
    printf(" ns/byte\n");
}

static void scale_check(const struct scale *s) {
    struct point v[SIZES];
    int n = points_run(s, v), worst = 0;
    double ratio = ratio_of(v, n, &worst);
    for (int i = 0; i < TRIES && ratio > RATIO; i++, ratio = ratio_of(v, n, &worst))
        point_run(s, &v[worst]);
    if (getenv("SHOAL_SCALING_SHOW")) points_show(s, v, n, ratio);
    if (ratio > RATIO)
        fail_msg("%s: a byte takes %.1f ns in %zu KB, %.1f times as long as in a smaller "
                 "input",
                 s->name, 1e9 * per_byte(&v[worst]), v[worst].size / KB, ratio);
}

/* Not under sanitizers: they need their full sizes, or a memmem that stops at the match. */
static bool is_whole(const char *name) {
    static const char *const names[] = {"YAML: long key", "settings: sections",
                                        "normalizer replace: blank"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

static void test_scale(void **state) {
    const struct scale *s = *state;
    const char *only = getenv("SHOAL_SCALING");
    if (SHRINK > 1 && is_whole(s->name)) {
        print_message("SKIP %s: not under sanitizers\n", s->name);
        skip();
    }
    if (!only || strstr(s->name, only)) scale_check(s);
}

/* A tokenizer.json that ends at any power of two is refused with its name and the position, and all
 * refusals together take no longer than a few times reading the whole file. */
static void test_truncated(void **state) {
    struct buf b = {0};
    struct error err;
    (void)state;
    tokenizer_words(&b, 4 * MB / SHRINK);
    size_t whole = b.len;
    double start = clock_used();
    tokenizer_good(&b);
    double once = clock_used() - start;
    start = clock_used();
    for (b.len = 1; b.len < whole; b.len *= 2) {
        assert_null(tokenizer_from_json(file_put("tokenizer.json", &b), &err));
        assert_int_equal(err.code, ERR_FORMAT);
        if (!strstr(err.text, "tokenizer.json', line 1, column ")) fail_msg("%s", err.text);
    }
    double all = clock_used() - start;
    if (all > 4 * once + 20 * TICK_SECONDS)
        fail_msg("cut at powers of two: %.3f s, whole: %.3f s", all, once);
    buf_release(&b);
}

/* The peak of a child's memory over its memory before, or 0 if the system does not report it. */
static size_t parse_peak(const struct buf *b) {
    int ends[2];
    size_t peak = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct error err;
        size_t before = process_memory("VmRSS");
        json_t *v = json_parse(b->data, b->len, "text", &err);
        peak = process_memory("VmHWM") - before;
        _exit(v && write(ends[1], &peak, sizeof(peak)) == sizeof(peak) ? 0 : 1);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], &peak, sizeof(peak));
    close(ends[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(n, sizeof(peak));
    return peak;
}

/* json_parse_memory is an upper bound of the memory of parsing, and not far above it;
 * JSON_PARSE_MEMORY_FACTOR is above both. */
static void test_json_memory(void **state) {
    static const struct {
        const char *name, *head, *unit, *tail;
    } texts_of[] = {
        {"numbers", "[", "1,", "]"},
        {"numbers in rows", "[", "[1],", "]"},
        {"empty texts", "[", "\"\",", "]"},
        {"texts", "[", "\"the quick brown fox jumps over\",", "]"},
        {"lists", "[", "[],", "]"},
        {"lists in lists", "[", "[[[[[]]]]],", "]"},
        {"objects", "[", "{},", "]"},
        {"one-letter keys", "[", "{\"a\":1},", "]"},
        {"lists under keys", "[", "{\"a\":[]},", "]"},
        {"objects under keys", "[", "{\"a\":{\"b\":{}}},", "]"},
        {"members", "[", "{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1},", "]"},
        {"one text", "[\"", "abcdefghijklmnopqrstuvwxyz", "\"]"},
        {"nine items", "[", "[1,1,1,1,1,1,1,1,1],", "]"},
    };
    (void)state;
    if (SHRINK > 1 || !process_memory("VmHWM")) {
        print_message("SKIP memory of JSON: the system does not report it\n");
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(texts_of); i++) {
        struct buf b = {0};
        repeat(&b, texts_of[i].head, texts_of[i].unit, texts_of[i].tail, 3 * MB);
        size_t peak = parse_peak(&b), cost = json_parse_memory(b.data, b.len);
        if (getenv("SHOAL_SCALING_SHOW"))
            printf("%-28s peak %5.1f, cost %5.1f bytes a byte\n", texts_of[i].name,
                   (double)peak / (double)b.len, (double)cost / (double)b.len);
        if (peak > cost || cost > JSON_PARSE_MEMORY_FACTOR * b.len)
            fail_msg("%s: parsing %zu bytes took %zu, json_cost returns %zu", texts_of[i].name,
                     b.len, peak, cost);
        buf_release(&b);
    }
    struct buf b = {0};
    members(&b, 3 * MB);
    assert_in_range(parse_peak(&b), MB, json_parse_memory(b.data, b.len));
    buf_release(&b);
}

static int scratch_make(void **state) {
    (void)state;
    snprintf(scratch, sizeof(scratch), "%s/shoal-scaling-XXXXXX",
             access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(scratch)) return -1;
    log_quiet = true;
    tokenizers_make();
    return 0;
}

static int scratch_remove(void **state) {
    (void)state;
    tokenizers_free();
    char *cmd = xasprintf("rm -rf '%s'", scratch);
    int rc = system(cmd);
    free(cmd);
    return rc;
}

int main(void) {
    enum { OTHERS = 2 };
    /* Freed memory is used again: where a page fault is expensive, large inputs would pay for fresh
     * pages that small ones do not need. */
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    struct CMUnitTest tests[ARRAY_LEN(scales) + OTHERS] = {cmocka_unit_test(test_json_memory),
                                                           cmocka_unit_test(test_truncated)};
    for (size_t i = 0; i < ARRAY_LEN(scales); i++)
        tests[i + OTHERS] = (struct CMUnitTest){.name = scales[i].name,
                                                .test_func = test_scale,
                                                .initial_state = (void *)(uintptr_t)&scales[i]};
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
