/*
 * test_synth: generated data: every filter on tables of answers, agreement, duplicates, equal
 * samples in any batch and order, and sources that identify the stored call.
 *
 * The results for single answers are in test/cases/synth.txt. Generation runs on a random model in
 * memory; a perplexity is compared with the trainer's loss of the same tokens.
 */
#define _GNU_SOURCE
#include "fixture.h"
#include "train/train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

enum { LEN = 256 };
static struct error err;
static struct model *model;
static char dir[] = "/tmp/shoal-synth-XXXXXX";

static int set_up(void **state) {
    (void)state;
    struct model_config c;
    if (model_preset_find("tiny-qwen3", &c, &err) != OK) return -1;
    c.max_seq_len = LEN; // each byte is a token
    model = fixture_model_of(c, false, TENSOR_F32, NUMERIC_EXACT);
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    model_close(model);
    char *command = xasprintf("rm -rf '%s'", dir);
    int rc = system(command);
    free(command);
    return rc;
}

static char *file_create(const char *name, const char *text) {
    char *path = path_join(dir, name);
    if (file_write(path, text, strlen(text), &err) != OK) fail_msg("%s", err.text);
    return path;
}

/* Flags as on the command line; `text` is modified. */
static struct synth_options options_of(const char *text) {
    struct synth_options o = {0};
    struct strings flags = {0}, rest = {0};
    char *copy = xstrdup(text), *at = copy, *word;
    while ((word = strsep(&at, " ")) != NULL)
        if (*word) strings_add(&flags, word);
    options_default(synth_option_rows, &o);
    if (options_parse(synth_option_rows, &o, flags.n, flags.v, &rest, &err) != OK || rest.n)
        fail_msg("'%s': %s", text, err.text);
    strings_release(&flags);
    free(copy);
    return o;
}

static void options_free(struct synth_options *o) {
    options_release(synth_option_rows, o);
}

/* Prompts "a", "b", …, without a file. */
static void prompts_add(struct synth *s, int n) {
    s->prompts.v = xcalloc((size_t)n, sizeof *s->prompts.v);
    s->prompts.n = n;
    for (int i = 0; i < n; i++) {
        char text[8];
        snprintf(text, sizeof text, "%c", 'a' + i);
        s->prompts.v[i].line = i + 1;
        s->prompts.v[i].messages = json_pack("[{s:s,s:s}]", "role", "user", "content", text);
    }
}

static struct synth_sample *sample_add(struct synth *s, int prompt, const char *text, size_t len) {
    s->v = xrealloc(s->v, sizeof *s->v * (size_t)(s->n + 1));
    struct synth_sample *x = &s->v[s->n++];
    *x = (struct synth_sample){.prompt = prompt, .finish = FINISH_STOP, .perplexity = 1};
    buf_add(&x->text, text, len);
    buf_puts(&x->text, "");
    return x;
}

static void filter(struct synth *s, const struct tokenizer *tok) {
    struct synth_filter_set *r = synth_filter_set_new(s->o, tok, &err);
    if (!r) fail_msg("%s", err.text);
    if (synth_filter(s, r, &err) != OK) fail_msg("%s", err.text);
    synth_filter_set_free(r);
}

static const char *filter_of(const struct synth *s, int i) {
    return s->v[i].filter == SYNTH_KEPT ? "kept" : synth_filter_name(s->v[i].filter);
}

/* \n, \t, \\ and \xHH, in place; returns the length. */
static size_t unescape(char *s) {
    char *out = s, *begin = s;
    for (; *s; s++) {
        unsigned byte;
        if (s[0] == '\\' && s[1] == 'x' && sscanf(s + 2, "%2x", &byte) == 1)
            *out++ = (char)byte, s += 3;
        else if (s[0] == '\\' && s[1])
            *out++ = s[1] == 'n' ? '\n' : s[1] == 't' ? '\t' : s[1], s++;
        else
            *out++ = *s;
    }
    *out = 0;
    return (size_t)(out - begin);
}

static void check_case(char *line, int n_line) {
    char *text = strstr(line, " | "), *want = text ? strstr(text + 3, " | ") : NULL;
    if (!want) fail_msg("line %d: no two bars", n_line);
    *text = *want = 0;
    unescape(line);
    size_t len = unescape(text += 3);
    struct synth_options o = options_of(line);
    struct synth s = {.o = &o};
    prompts_add(&s, 1);
    sample_add(&s, 0, text, len);
    filter(&s, NULL);
    if (strcmp(filter_of(&s, 0), want + 3) != 0)
        fail_msg("line %d: %s, not %s", n_line, filter_of(&s, 0), want + 3);
    synth_release(&s);
    options_free(&o);
}

static void test_cases(void **state) {
    (void)state;
    struct buf file = {0};
    int n_line = 0, n_cases = 0;
    if (file_read("test/cases/synth.txt", 1 << 20, &file, &err) != OK) fail_msg("%s", err.text);
    for (char *rest = file.data, *line; (line = strsep(&rest, "\n")) != NULL;) {
        n_line++;
        if (*line == 0 || *line == '#') continue;
        check_case(line, n_line);
        n_cases++;
    }
    buf_release(&file);
    assert_true(n_cases > 50);
}

static void test_unfinished(void **state) {
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        struct synth_options o = options_of(keep ? "--unfinished" : "");
        struct synth s = {.o = &o};
        prompts_add(&s, 1);
        sample_add(&s, 0, "a", 1);
        sample_add(&s, 0, "b", 1)->finish = FINISH_LENGTH;
        sample_add(&s, 0, "c", 1)->finish = FINISH_LOOP;
        filter(&s, NULL);
        assert_int_equal(synth_count_kept(&s), keep ? 3 : 1);
        assert_string_equal(filter_of(&s, 2), keep ? "kept" : "unfinished");
        synth_release(&s);
        options_free(&o);
    }
}

static void test_invalid_filters_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"--require (", "is not a regular expression"},
        {"--forbid a{2,1}", "is not a regular expression"},
        {"--language fr", "there are ja, zh, en, ko"},
        {"--max-perplexity x", "is not a bound"},
        {"--max-perplexity 0", "is not a bound"},
        {"--max-perplexity 101%", "is not a bound"},
        {"--min-perplexity 5%%", "is not a bound"},
        {"--min-perplexity nan", "is not a bound"},
        {"--json-schema test/cases/synth.txt", "synth.txt"},
        {"--json-schema nowhere.json", "nowhere.json"},
        {"--held-out nowhere.jsonl", "nowhere.jsonl"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct synth_options o = options_of(cases[i][0]);
        assert_null(synth_filter_set_new(&o, model->tok, &err));
        if (!strstr(err.text, cases[i][1])) fail_msg("%s: %s", cases[i][0], err.text);
        options_free(&o);
    }
}

static void test_answers_are_compared_by_value(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"answer: 12", "12"},
        {"work: 3 + 9\nAnswer:  12.\nthat is all", "12"},
        {"answer: 3\nanswer: 12", "12"},
        {"１２", "12"},
        {"それは 青い。", "それは青い"},
        {"それは青い", "それは青い"},
        {"Yes!", "yes"},
        {"3.5", "3.5"},
        {"答案：北京。", "答案:北京"},
        {"...", ""},
        {"", ""},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct buf out = {0};
        synth_extract_answer(cases[i][0], "answer:", &out);
        if (out.len != strlen(cases[i][1]) || memcmp(out.data, cases[i][1], out.len) != 0)
            fail_msg("'%s': '%.*s'", cases[i][0], (int)out.len, out.data);
        buf_release(&out);
    }
}

static void test_agreement(void **state) {
    (void)state;
    static const char *const texts[] = {"answer: 東京", "work: x\nanswer: 東京。",
                                        "answer: 京都", "東京",
                                        "answer: 大阪", "answer: 東京"};
    static const char *const fates[] = {"kept", "kept",      "agreement",
                                        "kept", "agreement", "unfinished"};
    struct synth_options o = options_of("--min-agreement 0.6");
    struct synth s = {.o = &o};
    prompts_add(&s, 2);
    for (int i = 0; i < 6; i++) sample_add(&s, i < 4 ? 0 : 1, texts[i], strlen(texts[i]));
    s.v[5].finish = FINISH_LENGTH;
    filter(&s, NULL);
    for (int i = 0; i < 6; i++) assert_string_equal(filter_of(&s, i), fates[i]);
    assert_true(s.v[0].agreement == 0.75 && s.v[2].agreement == 0.25 && s.v[4].agreement == 0.5);
    assert_true(s.v[5].agreement == 0);
    synth_release(&s);
    options_free(&o);
}

static void test_duplicates(void **state) {
    (void)state;
    static const char *const texts[] = {"空は青い。", "空は青い。", "空は\n青い。", "Blue",
                                        "ＢＬＵＥ",   "green",      "空は青い。"};
    static const char *const fates[] = {
        "kept", "duplicate", "near_duplicate", "kept", "near_duplicate", "kept", "kept"};
    struct synth_options o = options_of("");
    struct synth s = {.o = &o};
    prompts_add(&s, 2);
    for (int i = 0; i < 7; i++) sample_add(&s, i == 6, texts[i], strlen(texts[i]));
    filter(&s, NULL);
    for (int i = 0; i < 7; i++)
        assert_string_equal(filter_of(&s, i), fates[i]); // the last: another prompt
    struct buf text = {0};
    synth_report_text(&s, &text);
    assert_non_null(strstr(text.data, "2 prompts, 7 answers, 4 kept\n"));
    assert_non_null(strstr(text.data, "the first: line 1, answer 0, as answer 0 to the prompt in "
                                      "line 1: 空は 青い。"));
    json_t *v = synth_report_json(&s);
    assert_int_equal(json_integer_value(json_object_get(v, "kept")), 4);
    json_decref(v);
    buf_release(&text);
    synth_release(&s);
    options_free(&o);
}

static void test_held_out(void **state) {
    (void)state;
    char *path = file_create("held.jsonl", "{\"prompt\":\"A \",\"completion\":\"x\"}\n"
                                           "{\"messages\":[{\"role\":\"user\",\"content\":\"c\"},"
                                           "{\"role\":\"assistant\",\"content\":\"青\"}]}\n");
    char *flags = xasprintf("--held-out %s", path);
    struct synth_options o = options_of(flags);
    struct synth s = {.o = &o};
    prompts_add(&s, 3);
    for (int i = 0; i < 3; i++) sample_add(&s, i, "青", 3);
    filter(&s, model->tok);
    assert_string_equal(filter_of(&s, 0), "held_out"); // the question
    assert_string_equal(filter_of(&s, 1), "kept");
    assert_string_equal(filter_of(&s, 2), "held_out");
    struct buf text = {0};
    synth_report_text(&s, &text);
    assert_non_null(strstr(text.data, "asks what is in line 1 of the held-out samples"));
    buf_release(&text);
    synth_release(&s);
    options_free(&o);
    free(flags);
    free(path);
}

static void test_perplexity_bounds(void **state) {
    (void)state;
    static const struct {
        const char *flags;
        int low, high; /* kept of 1 … 10 */
    } cases[] = {
        {"--max-perplexity 7", 1, 7},     {"--min-perplexity 2.5", 3, 10},
        {"--max-perplexity 90%", 1, 9},   {"--max-perplexity 1%", 1, 1},
        {"--max-perplexity 100%", 1, 10}, {"--min-perplexity 20% --max-perplexity 95%", 3, 10},
        {"--min-perplexity 15%", 2, 10},  {"--min-perplexity 8 --max-perplexity 30%", 0, 0}};
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct synth_options o = options_of(cases[c].flags);
        struct synth s = {.o = &o};
        prompts_add(&s, 10);
        for (int i = 0; i < 10; i++) sample_add(&s, i, "x", 1)->perplexity = 1 + i * 3 % 10;
        filter(&s, NULL);
        for (int i = 0; i < 10; i++) {
            bool within = s.v[i].perplexity >= cases[c].low && s.v[i].perplexity <= cases[c].high;
            if ((s.v[i].filter == SYNTH_KEPT) != within)
                fail_msg("'%s': %g", cases[c].flags, s.v[i].perplexity);
        }
        synth_release(&s);
        options_free(&o);
    }
}

/* prompts */

static char *messages_text(const struct synth_prompts *p, int i) {
    return json_dumps(p->v[i].messages, JSON_COMPACT);
}

static void check_messages(const struct synth_prompts *p, int i, int line, const char *want) {
    char *text = messages_text(p, i);
    assert_string_equal(text, want);
    assert_int_equal(p->v[i].line, line);
    free(text);
}

static void test_prompts(void **state) {
    (void)state;
    struct synth_options o = options_of("--system 短く --template {topic}とは?");
    struct synth_prompts p;
    char *path = file_create("p.jsonl",
                             "{\"prompt\":\"空は?\",\"completion\":\"青\"}\n\n"
                             "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},"
                             "{\"role\":\"user\",\"content\":\"q\"},"
                             "{\"role\":\"assistant\",\"content\":\"was said\"}],\"id\":7}\n"),
         *topics = file_create("t.txt", "海\r\n\n山\n");
    assert_int_equal(synth_prompts_read(&p, path, &o, &err), OK);
    assert_int_equal(p.n, 2);
    check_messages(&p, 0, 1,
                   "[{\"role\":\"system\",\"content\":\"短く\"},"
                   "{\"role\":\"user\",\"content\":\"空は?\"}]");
    check_messages(
        &p, 1, 3,
        "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"q\"}]");
    synth_prompts_release(&p);
    assert_int_equal(synth_topics_read(&p, topics, &o, &err), OK);
    assert_int_equal(p.n, 2);
    check_messages(&p, 1, 3,
                   "[{\"role\":\"system\",\"content\":\"短く\"},"
                   "{\"role\":\"user\",\"content\":\"山とは?\"}]");
    synth_prompts_release(&p);
    options_free(&o);
    free(path);
    free(topics);
}

static void test_invalid_prompts_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"", "has no prompts"},
        {"{\"text\":\"x\"}", "line 1: expected"},
        {"[3]", "line 1: expected"},
        {"{\"prompt\":\"x\"}\n{\"prompt\":3}", "line 2: 'prompt' must be text"},
        {"{\"prompt\":\"x\",\"messages\":[]}", "line 1: expected"},
        {"{\"messages\":[]}", "something to answer"},
        {"{\"messages\":{}}", "something to answer"},
        {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\"}]}", "something to answer"},
        {"{\"messages\":[{\"role\":\"tool\",\"content\":\"x\"}]}", "line 1: 'messages[0]' must"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\"}]}",
         "line 1: 'messages[1]' must"},
        {"{\"messages\":[7]}", "line 1: 'messages[0]' must"},
        {"{\"prompt\":", "p.jsonl"},
    };
    struct synth_options o = options_of(""), bare = options_of("--template about");
    struct synth_prompts p;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *path = file_create("p.jsonl", cases[i][0]);
        assert_true(synth_prompts_read(&p, path, &o, &err) < 0);
        if (!strstr(err.text, cases[i][1])) fail_msg("%s: %s", cases[i][0], err.text);
        free(path);
    }
    char *topics = file_create("t.txt", "a\n\xff\n");
    assert_int_equal(synth_topics_read(&p, topics, &o, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 2"));
    assert_int_equal(synth_topics_read(&p, topics, &bare, &err), ERR_USAGE);
    options_free(&o);
    options_free(&bare);
    free(topics);
}

/* generation */

struct generation_setup { /* the state of one generation */
    struct pool *pool;
    struct engine *engine;
    struct recorder recorder;
    struct store *store;
};

static struct generation_setup setup_open(int threads, int seqs, const char *store,
                                          const struct recorded_adapter *adapters, int n) {
    struct generation_setup b = {.pool = pool_new(threads)};
    struct engine_options eo = {.max_rows = 32, .max_seqs = seqs, .max_len = LEN, .pool = b.pool};
    if (store) {
        b.store = store_open(store, &err);
        assert_non_null(b.store);
    }
    b.recorder = (struct recorder){.store = b.store,
                                   .model = model,
                                   .model_path = "m",
                                   .model_hash = model_hash(model, &err),
                                   .adapters = adapters,
                                   .n_adapters = n};
    b.engine = engine_new(model, &eo, &err);
    assert_non_null(b.engine);
    return b;
}

/* The recorder points into its owner, which must not move. */
static void setup_record(struct generation_setup *b, int seqs) {
    struct engine_options eo = {.max_rows = 32,
                                .max_seqs = seqs,
                                .max_len = LEN,
                                .pool = b->pool,
                                .on_finished = recorder_finished,
                                .on_finished_ctx = &b->recorder};
    engine_free(b->engine);
    b->engine = engine_new(model, &eo, &err);
}

static void setup_close(struct generation_setup *b) {
    engine_free(b->engine);
    store_close(b->store);
    pool_free(b->pool);
}

static void generate(struct synth *s, const struct synth_options *o,
                     const struct generation_setup *b, int n_prompts, int first) {
    s->o = o;
    s->model = model;
    s->engine = b->engine;
    prompts_add(s, n_prompts);
    for (int i = 0; i < n_prompts; i++) {
        char text[8];
        snprintf(text, sizeof text, "%c", 'a' + (i + first) % n_prompts);
        json_object_set_new(json_array_get(s->prompts.v[i].messages, 0), "content",
                            json_string(text));
    }
    if (synth_tokenize_prompts(s, &err) != OK || synth_generate(s, &err) != OK)
        fail_msg("%s", err.text);
}

static void check_same(const struct synth_sample *a, const struct synth_sample *b) {
    assert_string_equal(a->call, b->call);
    assert_true(a->seed == b->seed && a->index == b->index && a->finish == b->finish);
    assert_true(a->logprob == b->logprob && a->text.len == b->text.len && a->out.n == b->out.n);
    assert_memory_equal(a->text.data, b->text.data, a->text.len);
    assert_memory_equal(a->out.v, b->out.v, (size_t)a->out.n * sizeof *a->out.v);
}

static void test_samples_do_not_depend_on_the_batch(void **state) {
    (void)state;
    struct synth_options o = options_of("--samples 3 --n 12 --seed 5 --temp 1"),
                         other = options_of("--samples 3 --n 12 --seed 6 --temp 1");
    struct generation_setup a = setup_open(1, 2, NULL, NULL, 0),
                            b = setup_open(2, 9, NULL, NULL, 0);
    struct synth one = {0}, two = {0}, three = {0};
    generate(&one, &o, &a, 5, 0);
    generate(&two, &o, &b, 5, 2); // prompts in another order
    generate(&three, &other, &b, 5, 0);
    assert_int_equal(one.n, 15);
    int differ = 0, among = 0;
    for (int i = 0; i < one.n; i++) {
        check_same(&one.v[i], &two.v[(i + 9) % 15]);
        differ += one.v[i].seed != three.v[i].seed;
        among += strcmp(one.v[i].call, one.v[i / 3 * 3].call) != 0;
    }
    assert_int_equal(differ, 15);
    assert_int_equal(among, 10);
    synth_release(&one);
    synth_release(&two);
    synth_release(&three);
    setup_close(&a);
    setup_close(&b);
    options_free(&o);
    options_free(&other);
}

/* Replays the record of a sample's call like `shoal replay`, and compares the text. */
static void check_replay(struct generation_setup *b, const struct synth_sample *x,
                         struct adapter *adapter) {
    json_t *call = store_record_get(b->store, x->call, &err);
    struct arena arena = {0};
    struct grammar *grammar = NULL;
    struct engine_request r = {0};
    struct buf text = {0};
    if (!call) fail_msg("%s", err.text);
    int rc = record_inputs_parse(json_object_get(call, "inputs"), &arena, &r, &grammar, &err);
    r.adapter = adapter;
    if (rc != OK || engine_run(b->engine, &r, 1, NULL, &err) != OK) fail_msg("%s", err.text);
    tokenizer_decode(model->tok, r.out, r.n_out, false, &text);
    assert_int_equal(text.len, x->text.len);
    if (text.len) assert_memory_equal(text.data, x->text.data, text.len);
    engine_request_release(&r);
    arena_release(&arena);
    buf_release(&text);
    json_decref(call);
}

static void test_source_identifies_the_call(void **state) {
    (void)state;
    struct synth_options o = options_of("--samples 2 --n 9 --temp 1");
    char *path = path_join(dir, "calls.db");
    struct adapter *ad = fixture_adapter(&model->config, 4, "all-linear", 0.05f, 3);
    struct recorded_adapter named = {"a", ad};
    struct generation_setup b = setup_open(1, 4, path, &named, 1);
    setup_record(&b, 4);
    struct synth first = {.adapter = ad}, again = {.adapter = ad, .calls = b.store};
    generate(&first, &o, &b, 3, 0);
    assert_int_equal(b.recorder.n, 6);
    generate(&again, &o, &b, 3, 0);
    assert_int_equal(again.n_reused, 6); // and nothing was computed
    assert_int_equal(b.recorder.n, 6);
    for (int i = 0; i < 6; i++) {
        check_same(&first.v[i], &again.v[i]);
        check_replay(&b, &first.v[i], ad);
    }
    synth_release(&first);
    synth_release(&again);
    setup_close(&b);
    adapter_release(ad);
    options_free(&o);
    free(path);
}

/* A record that is damaged, or was made by another version, is computed again. */
static void test_damaged_records_are_computed_again(void **state) {
    (void)state;
    static const char *const damage[] = {"{\"version\":\"0\"}",
                                         "{\"outputs\":{\"out\":[1],\"logprobs\":[]}}",
                                         "{\"outputs\":{\"out\":[99999999],\"logprobs\":[0.0],"
                                         "\"finish\":\"stop\"}}",
                                         "{\"outputs\":{\"out\":[1],\"logprobs\":[0.0],"
                                         "\"finish\":\"none\"}}",
                                         "{\"outputs\":{}}"};
    struct synth_options o = options_of("--samples 1 --n 5 --temp 1");
    char *path = path_join(dir, "bad.db");
    struct generation_setup b = setup_open(1, 4, path, NULL, 0);
    setup_record(&b, 4);
    struct synth first = {0};
    generate(&first, &o, &b, 1, 0);
    for (size_t i = 0; i < ARRAY_LEN(damage); i++) {
        json_t *call = store_record_get(b.store, first.v[0].call, &err),
               *bad = json_loads(damage[i], 0, NULL);
        struct synth again = {.calls = b.store};
        json_object_update(call, bad);
        assert_int_equal(store_record_put(b.store, first.v[0].call, call, &err), OK);
        generate(&again, &o, &b, 1, 0);
        assert_int_equal(again.n_reused, 0);
        check_same(&first.v[0], &again.v[0]);
        synth_release(&again);
        json_decref(call);
        json_decref(bad);
    }
    synth_release(&first);
    setup_close(&b);
    options_free(&o);
    free(path);
}

/* exp of the trainer's mean loss of the same tokens under the judge. */
static double trainer_perplexity(const struct synth *s, const struct synth_sample *x,
                                 struct adapter *judge) {
    const struct token_ids *prompt = &s->prompts.v[x->prompt].tokens;
    struct token_ids all = {0};
    struct train_options o = {0};
    double nll;
    int32_t targets;
    options_default(train_option_rows, &o);
    free(o.kv_cache_dtype);
    o.kv_cache_dtype = NULL; // f32, as in the engine
    struct trainer *t = trainer_new_lora(model, &judge, 1, &o, NULL, &err);
    if (!t) fail_msg("%s", err.text);
    for (int i = 0; i < prompt->n; i++) token_ids_add(&all, prompt->v[i]);
    for (int i = 0; i < x->out.n; i++) token_ids_add(&all, x->out.v[i]);
    uint8_t *mask = xcalloc((size_t)all.n, 1);
    memset(mask + prompt->n, 1, (size_t)x->out.n);
    struct train_sample sample = {.tokens = all.v, .mask = mask, .n = all.n};
    assert_int_equal(trainer_sample_nll(t, &sample, 1, &nll, &targets, &err), OK);
    assert_int_equal(targets, x->out.n);
    trainer_free(t);
    options_release(train_option_rows, &o);
    token_ids_release(&all);
    free(mask);
    return math_exp(nll / targets);
}

static void test_judge(void **state) {
    (void)state;
    struct synth_options o = options_of("--samples 2 --n 9 --temp 1");
    struct adapter *judge = fixture_adapter(&model->config, 4, "all-linear", 0.05f, 8);
    struct generation_setup b = setup_open(2, 4, NULL, NULL, 0);
    struct synth s = {0};
    generate(&s, &o, &b, 3, 0);
    assert_int_equal(synth_score_perplexity(&s, &err), OK); // the base scores its own samples: no
                                                            // pass
    double own = s.v[4].perplexity;
    for (int i = 0; i < s.n; i++) s.v[i].perplexity = 0;
    s.v[0].filter = 2;
    s.judge = judge;
    assert_int_equal(synth_score_perplexity(&s, &err), OK);
    assert_true(s.v[0].perplexity == 0); // a dropped sample is not scored
    for (int i = 1; i < s.n; i++) {
        double want = trainer_perplexity(&s, &s.v[i], judge);
        assert_true(s.v[i].perplexity > want * (1 - 1e-5) && s.v[i].perplexity < want * (1 + 1e-5));
    }
    s.v[4].perplexity = 0; // the base again, now scored by a judge with another name
    s.adapter = judge;
    s.judge = NULL;
    assert_int_equal(synth_score_perplexity(&s, &err), OK);
    assert_true(s.v[4].perplexity == own);
    synth_release(&s);
    setup_close(&b);
    adapter_release(judge);
    options_free(&o);
}

/* `shoal train` reads the lines, and they contain their source. */
static void test_lines(void **state) {
    (void)state;
    struct synth_options o = options_of("");
    struct synth s = {.o = &o, .model = model};
    struct buf lines = {0};
    struct dataset d;
    prompts_add(&s, 2);
    sample_add(&s, 0, "空は\"青い\"。", strlen("空は\"青い\"。"))->seed = 4503599627370495;
    sample_add(&s, 1, "dropped", 7)->finish = FINISH_LENGTH;
    sample_add(&s, 1, "天很蓝", 9);
    assert_non_null(model_hash(model, &err));
    filter(&s, NULL);
    assert_int_equal(synth_format_jsonl(&s, &lines, &err), OK);
    char *path = file_create("lines.jsonl", lines.data);
    if (dataset_load(&d, path, NULL, model->tok, 0, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(d.n, 2);
    dataset_release(&d);
    json_t *v = json_loads(lines.data, JSON_DISABLE_EOF_CHECK, NULL),
           *source = json_object_get(v, "source");
    assert_string_equal(json_string_value(json_object_get(
                            json_array_get(json_object_get(v, "messages"), 1), "content")),
                        "空は\"青い\"。");
    assert_int_equal(json_integer_value(json_object_get(source, "seed")), 4503599627370495);
    assert_string_equal(json_string_value(json_object_get(source, "model_hash")), model->hash);
    assert_true(json_is_null(json_object_get(source, "adapter_hash")));
    assert_null(json_object_get(source, "level")); // of exact bits
    json_decref(v);
    buf_release(&lines);
    synth_release(&s);
    options_free(&o);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_unfinished),
        cmocka_unit_test(test_invalid_filters_are_refused),
        cmocka_unit_test(test_answers_are_compared_by_value),
        cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_held_out),
        cmocka_unit_test(test_perplexity_bounds),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_invalid_prompts_are_refused),
        cmocka_unit_test(test_samples_do_not_depend_on_the_batch),
        cmocka_unit_test(test_source_identifies_the_call),
        cmocka_unit_test(test_damaged_records_are_computed_again),
        cmocka_unit_test(test_judge),
        cmocka_unit_test(test_lines),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
