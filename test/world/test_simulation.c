/*
 * test_simulation: policies that act, learn and breed. Probabilities of the policy runner equal
 * those of the model, returns equal a naive implementation of the formula, gradients equal the
 * loss's numerical gradients, and a simulation has the same result for any number of threads and
 * after any interruption.
 *
 * The model is tiny and initialised from a seed, with fry's tokenizer, in which the six actions
 * begin with six different tokens. Tests of decisions and gradients repeat with other tokenizers,
 * in which an action is several tokens.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "folder.h"
#include "old_defaults.h"
#include "world/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { ACTIONS = 6, POLICIES = 4 };

static struct model *model;
static struct adapter *fixture_adapters[POLICIES]; /* adapters of rank 2, all different */
static char folder[64];

/* an environment whose agents do not interact */

enum { TOY_AGENTS = 8 };
struct toy {
    struct environment e;
    uint64_t seed;
    int tick, dies_at[TOY_AGENTS]; /* 0: never */
    int n_parsed, parsed_action;   /* number of parsed texts, and the action that parsing returns */
};
static const char *const words[ACTIONS] = {"north", "south", "east", "west", "pick", "drop"};

static int toy_state(const struct toy *t, int agent) {
    return (int)((t->seed + (uint64_t)(7 * agent + t->tick * (agent + 3))) % 5);
}

static int toy_reset(void *ctx, uint64_t seed, struct error *err) {
    struct toy *t = ctx;
    (void)err;
    t->seed = seed;
    t->tick = 0;
    return OK;
}

static bool toy_prompt(void *ctx, int agent, struct buf *out) {
    struct toy *t = ctx;
    if (t->dies_at[agent] && t->tick >= t->dies_at[agent]) return false;
    buf_printf(out, "x o %c f%s:", "abcde"[toy_state(t, agent)], agent % 2 ? " u" : "");
    return true;
}

static int toy_expert_action(void *ctx, int agent) {
    return (toy_state(ctx, agent) * 2) % ACTIONS;
}

static int toy_step(void *ctx, const int16_t *actions, double *rewards, struct error *err) {
    struct toy *t = ctx;
    (void)err;
    for (int i = 0; i < t->e.n_agents; i++)
        rewards[i] = actions[i] == toy_expert_action(t, i) ? 1 : -0.05 * actions[i];
    t->tick++;
    return OK;
}

static int toy_parse(void *ctx, const char *text) {
    struct toy *t = ctx;
    assert_non_null(text);
    t->n_parsed++;
    return t->parsed_action;
}

static const char *const *action_names = words; /* of environments that tests create from now on */
static int n_words;                             /* their words; 0: no channel */

static void toy_init(struct toy *t, int agents) {
    *t = (struct toy){.parsed_action = -1};
    t->e = (struct environment){.ctx = t,
                                .n_agents = agents,
                                .n_actions = ACTIONS,
                                .actions = action_names,
                                .n_words = n_words,
                                .words = world_word_letters,
                                .reset = toy_reset,
                                .prompt = toy_prompt,
                                .step = toy_step,
                                .parse = toy_parse,
                                .expert_action = toy_expert_action};
}

static int suite_setup(void **state) {
    (void)state;
    struct model_config c;
    struct error err;
    if (model_preset_find("tiny-llama", &c, &err) != OK) return -1;
    if (!(model = fixture_model_with_fry_tokenizer(c))) return -1;
    for (int i = 0; i < POLICIES; i++)
        fixture_adapters[i] =
            fixture_adapter(&model->config, 2, "q_proj,v_proj,down_proj", 0.15f, 100 + (uint64_t)i);
    bool memory = access("/dev/shm", W_OK | X_OK) == 0;
    snprintf(folder, sizeof folder, "%s/shoal-simulation-XXXXXX", memory ? "/dev/shm" : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int suite_teardown(void **state) {
    (void)state;
    for (int i = 0; i < POLICIES; i++) adapter_release(fixture_adapters[i]);
    model_close(model);
    return folder_remove(folder);
}

/* tokenizers */

/* A token per byte; BPE with tokens for some actions, the others begin with the token of a space;
 * SentencePiece, which adds a space before a text, with tokens for all actions; the same without
 * tokens of bytes. */
enum tokenizer_name { FRY, BYTES, BPE, SPM, SPM_WITHOUT_BYTES, N_TOKENIZERS };

static struct tokenizer *bpe_tokenizer(void) {
    struct error err;
    static const char text[] = " pick south pick south pick south";
    return tokenizer_train_bpe(text, strlen(text), 256 + 9, "gpt-2", NULL, 0, 0, &err);
}

static struct tokenizer *spm_tokenizer(bool bytes) {
    enum { N = 400 };
    static const char *const first[] = {"<unk>", "<s>", "</s>", "▁", "x", "o", "f", "u", ":"};
    static const uint8_t types[] = {PIECE_UNKNOWN, PIECE_CONTROL, PIECE_CONTROL};
    char *pieces[N];
    struct error err;
    struct tokenizer_spec spec = {.kind = TOKENIZER_SPM,
                                  .pieces = (const char **)pieces,
                                  .lens = (int32_t[N]){0},
                                  .scores = (float[N]){0},
                                  .types = (uint8_t[N]){0},
                                  .unk = 0,
                                  .bos = 1,
                                  .eos = 2,
                                  .add_bos = true,
                                  .add_space_prefix = true};
    int n = 0;
    for (size_t i = 0; i < ARRAY_LEN(first); i++) pieces[n++] = xstrdup(first[i]);
    for (int i = 0; i < ACTIONS; i++) // "▁n", "▁no", …: the merges of a word
        for (int k = 1; k <= (int)strlen(words[i]); k++)
            pieces[n++] = xasprintf("▁%.*s", k, words[i]);
    int n_normal = n;
    for (int i = 0; bytes && i < 256; i++) pieces[n++] = xasprintf("<0x%02X>", i);
    for (int i = 0; i < n; i++) {
        ((int32_t *)(uintptr_t)spec.lens)[i] = (int32_t)strlen(pieces[i]);
        ((float *)(uintptr_t)spec.scores)[i] = (float)-i;
        ((uint8_t *)(uintptr_t)spec.types)[i] = i < (int)ARRAY_LEN(types) ? types[i]
                                                : i < n_normal            ? PIECE_NORMAL
                                                                          : PIECE_BYTE;
    }
    spec.n = n;
    struct tokenizer *t = tokenizer_new(&spec, &err);
    if (!t) fail_msg("%s", err.text);
    while (n > 0) free(pieces[--n]);
    return t;
}

/* Gives the model another tokenizer; FRY restores its own. */
static void tokenizer_use(enum tokenizer_name name) {
    static struct tokenizer *fry;
    if (!fry)
        fry = model->tok;
    else if (model->tok != fry)
        tokenizer_free(model->tok);
    model->tok = name == FRY     ? fry
                 : name == BYTES ? tokenizer_new_bytes(model->config.vocab_size)
                 : name == BPE   ? bpe_tokenizer()
                                 : spm_tokenizer(name == SPM);
    assert_non_null(model->tok);
}

/* decisions */

static const char *const prompts[] = {"x o f u o - - e + - n:", "u u u u o f n w + p p:", "o",
                                      "x u f",
                                      "x x x x x x x x x x x x x x x x x x x x x x x x x:"};

static struct policy_runner *runner_new(struct toy *t, double temperature, bool text) {
    struct error err;
    struct policy_runner_options o = {.temperature = temperature, .text = text, .max_len = 100};
    struct policy_runner *a = policy_runner_new(model, &t->e, &o, &err);
    if (!a) fail_msg("%s", err.text);
    return a;
}

static struct policy_decision decision_init(struct buf *text, const char *prompt, struct adapter *a,
                                            uint64_t seed) {
    struct policy_decision decision = {.adapter = a,
                                       .rng = rng_make(seed, RNG_TEST, 3, 0),
                                       .text_offset = text->len,
                                       .text_len = strlen(prompt)};
    buf_puts(text, prompt);
    return decision;
}

static void decide(struct policy_runner *a, struct policy_decision *decisions, int n,
                   const struct buf *text) {
    struct error err;
    if (policy_runner_act(a, decisions, n, text, &err) != OK) fail_msg("%s", err.text);
}

static void decide_one(struct policy_runner *a, const char *prompt, struct adapter *adapter,
                       struct policy_decision *out) {
    struct buf text = {0};
    *out = decision_init(&text, prompt, adapter, 1);
    decide(a, out, 1, &text);
    buf_release(&text);
}

/* The tokens that a choice and a line break add to a prompt. */
static struct token_ids continuation_of(const struct token_ids *prompt, const char *prompt_text,
                                        const char *choice) {
    struct token_ids ids = {0};
    char *text = xasprintf("%s %s\n", prompt_text, choice);
    tokenizer_encode(model->tok, text, strlen(text), TOKENIZER_ADD_BOS, &ids);
    assert_memory_equal(ids.v, prompt->v, (size_t)prompt->n * sizeof(int32_t));
    ids.n -= prompt->n;
    memmove(ids.v, ids.v + prompt->n, (size_t)ids.n * sizeof(int32_t));
    free(text);
    return ids;
}

/* The length of the shortest beginning of choice i that is not the beginning of another one. */
static int32_t distinct_tokens(const struct token_ids *choices, int i) {
    for (int32_t n = 1; n <= choices[i].n; n++) {
        bool is_shared = false;
        for (int j = 0; j < ACTIONS; j++)
            is_shared |= j != i && choices[j].n >= n &&
                         memcmp(choices[j].v, choices[i].v, (size_t)n * sizeof(int32_t)) == 0;
        if (!is_shared) return n;
    }
    fail_msg("choice %d is the beginning of another one", i);
    return 0;
}

/* The trainer's loss of each choice after a prompt, in nats over the vocabulary, summed over its
 * tokens up to the first one that distinguishes it. Returns the largest number of these tokens. */
static int choice_costs(struct trainer *t, const char *prompt, const char *const *choices,
                        double *out) {
    struct error err;
    struct token_ids ids = {0}, rest[ACTIONS];
    struct train_sample v[ACTIONS];
    int32_t counts[ACTIONS], longest = 0;
    tokenizer_encode(model->tok, prompt, strlen(prompt), TOKENIZER_ADD_BOS, &ids);
    for (int i = 0; i < ACTIONS; i++) rest[i] = continuation_of(&ids, prompt, choices[i]);
    for (int i = 0; i < ACTIONS; i++) {
        int32_t n = distinct_tokens(rest, i);
        longest = MAX(longest, n);
        v[i] = (struct train_sample){.tokens = xcalloc((size_t)(ids.n + n), sizeof(int32_t)),
                                     .mask = xcalloc((size_t)(ids.n + n), 1),
                                     .n = ids.n + n};
        memcpy(v[i].tokens, ids.v, (size_t)ids.n * sizeof(int32_t));
        memcpy(v[i].tokens + ids.n, rest[i].v, (size_t)n * sizeof(int32_t));
        memset(v[i].mask + ids.n, 1, (size_t)n);
    }
    if (trainer_sample_nll(t, v, ACTIONS, out, counts, &err) != OK) fail_msg("%s", err.text);
    for (int i = 0; i < ACTIONS; i++) {
        train_sample_release(&v[i]);
        token_ids_release(&rest[i]);
    }
    token_ids_release(&ids);
    return longest;
}

static void assert_softmax(const double *costs, double temperature, const double *logp) {
    double sum = 0;
    for (int i = 0; i < ACTIONS; i++) sum += exp((costs[0] - costs[i]) / temperature);
    for (int i = 0; i < ACTIONS; i++) {
        double want = (costs[0] - costs[i]) / temperature - log(sum);
        if (fabs(want - logp[i]) > 2e-5 * (1 + fabs(want)))
            fail_msg("action %d at temperature %g: %.9f, not %.9f", i, temperature, logp[i], want);
    }
}

static struct train_options score_options(void) {
    struct train_options o = {0};
    o.max_grad_norm = 1;
    return o;
}

/* Decisions under the tokenizer of the model equal the softmax of the trainer's losses. Returns the
 * largest number of tokens of an action. */
static int policy_compare(const char *const *names) {
    static const double temperatures[] = {0.3, 1, 2.5};
    struct error err;
    struct toy toy;
    int longest = 0;
    action_names = names;
    n_words = ACTIONS;
    toy_init(&toy, 1);
    n_words = 0;
    action_names = words;
    struct adapter *zero = adapter_scale(fixture_adapters[0], 0);
    for (int k = 0; k < 2; k++) {
        struct train_options o = score_options();
        struct trainer *t =
            trainer_new_lora(model, k ? &fixture_adapters[1] : &zero, 1, &o, NULL, &err);
        assert_non_null(t);
        for (size_t i = 0; i < ARRAY_LEN(temperatures); i++) {
            struct policy_runner *a = runner_new(&toy, temperatures[i], false);
            for (size_t p = 0; p < ARRAY_LEN(prompts); p++) {
                struct policy_decision decision;
                double costs[ACTIONS];
                decide_one(a, prompts[p], k ? fixture_adapters[1] : NULL, &decision);
                longest = MAX(longest, choice_costs(t, prompts[p], names, costs));
                assert_softmax(costs, temperatures[i], decision.logp);
                struct buf text = {0};
                decision = decision_init(&text, prompts[p], k ? fixture_adapters[1] : NULL, 1);
                decision.says_word = true;
                decide(a, &decision, 1, &text);
                choice_costs(t, prompts[p], world_word_letters, costs);
                assert_softmax(costs, temperatures[i], decision.logp);
                buf_release(&text);
            }
            policy_runner_free(a);
        }
        trainer_free(t);
    }
    adapter_release(zero);
    return longest;
}

static const char *const japanese[ACTIONS] = {"北", "南", "東", "西", "拾う", "置く"};
static const char *const nested[ACTIONS] = {"up", "up_left", "u", "down", "down_left", "up_le"};

static void test_policy_equals_the_model(void **state) {
    (void)state;
    static const struct {
        enum tokenizer_name tokenizer;
        int tokens[3]; /* the largest number of tokens of an action: words, japanese, nested */
    } cases[] = {{FRY, {1, 2, 5}}, {BYTES, {2, 3, 7}}, {BPE, {2, 3, 7}}, {SPM, {1, 3, 7}}};
    const char *const *names[] = {words, japanese, nested};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        tokenizer_use(cases[i].tokenizer);
        for (size_t k = 0; k < ARRAY_LEN(names); k++) {
            int n = policy_compare(names[k]);
            if (n != cases[i].tokens[k])
                fail_msg("tokenizer %zu, names %zu: %d tokens, not %d", i, k, n,
                         cases[i].tokens[k]);
        }
    }
    tokenizer_use(FRY);
}

/* Without tokens of bytes, a character without a token is the unknown token. */
static void test_actions_with_the_same_tokens(void **state) {
    (void)state;
    struct error err;
    struct toy toy;
    struct policy_runner_options o = {.temperature = 1};
    action_names = japanese;
    toy_init(&toy, 1);
    action_names = words;
    tokenizer_use(SPM_WITHOUT_BYTES);
    assert_null(policy_runner_new(model, &toy.e, &o, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_non_null(strstr(err.text, "cannot distinguish the actions '北' and '南'"));
    o.text = true; // text mode needs no distinct tokens
    struct policy_runner *a = policy_runner_new(model, &toy.e, &o, &err);
    assert_non_null(a);
    policy_runner_free(a);
    tokenizer_use(FRY);
}

static void test_sampling_follows_the_generator(void **state) {
    (void)state;
    enum { SAMPLES = 400 };
    struct toy toy;
    struct buf text = {0};
    struct policy_decision *decisions = xcalloc(SAMPLES, sizeof *decisions);
    int counts[ACTIONS] = {0};
    toy_init(&toy, 1);
    struct policy_runner *a = runner_new(&toy, 1.5, false);
    for (int i = 0; i < SAMPLES; i++)
        decisions[i] = decision_init(&text, prompts[0], fixture_adapters[0], (uint64_t)i);
    decide(a, decisions, SAMPLES, &text);
    for (int i = 0; i < SAMPLES; i++) {
        struct rng r = rng_make((uint64_t)i, RNG_TEST, 3, 0);
        double uniform = (double)rng_uniform(&r), below = 0;
        for (int k = 0; k < decisions[i].action; k++) below += exp(decisions[i].logp[k]);
        double above = below + exp(decisions[i].logp[decisions[i].action]);
        if (uniform < below - 1e-9 || uniform > above + 1e-9)
            fail_msg("draw %d: %g took action %d, which has [%g, %g)", i, uniform,
                     decisions[i].action, below, above);
        counts[decisions[i].action]++;
    }
    for (int k = 0; k < ACTIONS; k++) {
        double p = exp(decisions[0].logp[k]), n = SAMPLES;
        if (fabs(counts[k] - n * p) > 5 * sqrt(n * p * (1 - p)) + 1)
            fail_msg("action %d was drawn %d times of %g", k, counts[k], n * p);
    }
    policy_runner_free(a);
    buf_release(&text);
    free(decisions);
}

static void test_batch_equals_single_decisions(void **state) {
    (void)state;
    enum { N = 3 * (int)ARRAY_LEN(prompts) };
    struct adapter *runner_adapters[3] = {NULL, fixture_adapters[0], fixture_adapters[1]};
    struct policy_decision decisions[N], single;
    struct toy toy;
    struct buf text = {0};
    toy_init(&toy, 1);
    struct policy_runner *a = runner_new(&toy, 1, false);
    for (int i = 0; i < N; i++)
        decisions[i] = decision_init(&text, prompts[i / 3], runner_adapters[i % 3], 1);
    decide(a, decisions, N, &text);
    for (int i = 0; i < N; i++) {
        int32_t n = decisions[i].n;
        decide_one(a, prompts[i / 3], runner_adapters[i % 3], &single);
        assert_memory_equal(decisions[i].logp, single.logp, ACTIONS * sizeof(double));
        assert_int_equal(decisions[i].action, single.action);
        assert_int_equal(n, single.n);
        if (i % 3)
            assert_memory_not_equal(decisions[i].logp, decisions[i - 1].logp, sizeof(double));
    }
    policy_runner_free(a);
    buf_release(&text);
}

/* Equal decisions, decisions of earlier batches and decisions that replaced them in a small
 * cache equal those of a runner without a cache, bit by bit. Each is sampled with its own random
 * source. */
static void test_cached_decisions_have_equal_bits(void **state) {
    (void)state;
    enum { N = 12, BATCHES = 8 };
    static const int sizes[] = {1, 3, 1000};
    struct adapter *runner_adapters[3] = {NULL, fixture_adapters[0], fixture_adapters[1]};
    struct policy_decision decisions[N], want;
    struct toy toy;
    struct error err;
    struct buf text = {0};
    toy_init(&toy, 1);
    struct policy_runner *plain = runner_new(&toy, 1, false);
    for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
        struct policy_runner_options o = {
            .temperature = 1, .max_len = 100, .cached_decisions = sizes[k]};
        struct policy_runner *a = policy_runner_new(model, &toy.e, &o, &err);
        assert_non_null(a);
        struct rng r = rng_make(k, RNG_TEST, 0, 0);
        for (int b = 0; b < BATCHES; b++) {
            const char *prompt[N];
            int adapter[N];
            text.len = 0;
            for (int i = 0; i < N; i++) {
                prompt[i] = prompts[rng_below(&r, (uint32_t)ARRAY_LEN(prompts))];
                adapter[i] = (int)rng_below(&r, 3);
                decisions[i] =
                    decision_init(&text, prompt[i], runner_adapters[adapter[i]], (uint64_t)(i % 2));
            }
            decide(a, decisions, N, &text);
            for (int i = 0; i < N; i++) {
                struct buf one = {0};
                want =
                    decision_init(&one, prompt[i], runner_adapters[adapter[i]], (uint64_t)(i % 2));
                decide(plain, &want, 1, &one);
                assert_memory_equal(decisions[i].logp, want.logp, ACTIONS * sizeof(double));
                assert_int_equal(decisions[i].action, want.action);
                buf_release(&one);
            }
        }
        policy_runner_free(a);
    }
    policy_runner_free(plain);
    buf_release(&text);
}

/* With an engine for each thread decisions equal those of a runner with one engine, bit by bit. A
 * prompt that does not fit is an error, after which the runner still works. */
static void test_engines_of_threads_have_equal_bits(void **state) {
    (void)state;
    enum { N = 40 };
    struct adapter *runner_adapters[3] = {NULL, fixture_adapters[0], fixture_adapters[1]};
    struct policy_decision decisions[N], want[N];
    struct toy toy;
    struct error err;
    struct buf text = {0}, dots = {0};
    toy_init(&toy, 1);
    for (int i = 0; i < model->config.max_seq_len; i++) buf_puts(&dots, "x ");
    struct policy_runner *plain = runner_new(&toy, 1, false);
    for (int threads = 2; threads <= 9; threads += 7) { // an engine each, and one for all nine
        struct policy_runner_options o = {.temperature = 1, .max_len = 100};
        o.pool = pool_new(threads);
        struct policy_runner *a = policy_runner_new(model, &toy.e, &o, &err);
        assert_non_null(a);
        for (int round = 0; round < 3; round++) {
            text.len = 0;
            for (int i = 0; i < N; i++)
                want[i] = decisions[i] =
                    decision_init(&text, prompts[i % (int)ARRAY_LEN(prompts)],
                                  runner_adapters[i % 3], (uint64_t)(round * N + i));
            decide(plain, want, N, &text);
            decide(a, decisions, N, &text);
            for (int i = 0; i < N; i++) {
                assert_memory_equal(decisions[i].logp, want[i].logp, ACTIONS * sizeof(double));
                assert_int_equal(decisions[i].action, want[i].action);
            }
            decisions[N / 2] = decision_init(&text, dots.data, fixture_adapters[0], 1);
            assert_int_equal(policy_runner_act(a, decisions, N, &text, &err), ERR_USAGE);
            assert_non_null(strstr(err.text, "of the context"));
            policy_runner_sleep(a);
        }
        policy_runner_free(a);
        pool_free(o.pool);
    }
    policy_runner_free(plain);
    buf_release(&dots);
    buf_release(&text);
}

/* The fast class normalises over the actions alone; it differs from the exact class in rounding:
 * with tiles attention is in bf16. */
static void test_fast_class_policy(void **state) {
    (void)state;
    struct error err;
    struct toy toy;
    struct policy_runner_options o = {.temperature = 1.5, .max_len = 100};
    const bool tiles = kernels_get()->attention;
    toy_init(&toy, 1);
    struct policy_runner *exact = runner_new(&toy, 1.5, false);
    enum numeric_class old_class = model->cls;
    for (size_t p = 0; p < ARRAY_LEN(prompts); p++) {
        struct policy_decision a, b;
        decide_one(exact, prompts[p], fixture_adapters[0], &a);
        model->cls = NUMERIC_FAST; // the same weights: f32 products have one class
        struct policy_runner *fast = policy_runner_new(model, &toy.e, &o, &err);
        decide_one(fast, prompts[p], fixture_adapters[0], &b);
        policy_runner_free(fast);
        model->cls = old_class;
        for (int i = 0; i < ACTIONS; i++)
            assert_true(fabs(a.logp[i] - b.logp[i]) < (tiles ? 5e-2 : 1e-5));
        if (!tiles) assert_int_equal(a.action, b.action);
    }
    policy_runner_free(exact);
}

/* Prompts that are longer than the engines allow change the engines, not the decisions; longer ones
 * than the model allows are an error, after which the runner still works. */
static void test_long_prompts(void **state) {
    (void)state;
    enum { N = (int)ARRAY_LEN(prompts) };
    struct error err;
    struct toy toy;
    struct buf text = {0}, dots = {0};
    toy_init(&toy, 1);
    for (int i = 0; i < model->config.max_seq_len; i++) buf_puts(&dots, "x ");
    for (int k = 0; k < 4; k++) {
        struct policy_decision decisions[N], want[N];
        struct policy_runner_options o = {
            .temperature = 1, .max_len = 4, .max_seqs = k & 1 ? 40 : 2, .pool = pool_new(2)};
        if (k & 2) o.n_pages = 1;
        tokenizer_use(k & 1 ? BYTES : FRY);
        struct policy_runner *plain = runner_new(&toy, 1, false),
                             *a = policy_runner_new(model, &toy.e, &o, &err);
        assert_non_null(a);
        for (int round = 0; round < 2; round++) {
            text.len = 0;
            for (int i = 0; i < N; i++)
                want[i] = decisions[i] = decision_init(&text, prompts[i], fixture_adapters[0], 1);
            decide(plain, want, N, &text);
            decide(a, decisions, N, &text);
            for (int i = 0; i < N; i++)
                assert_memory_equal(decisions[i].logp, want[i].logp, ACTIONS * sizeof(double));
            decisions[0] = decision_init(&text, dots.data, NULL, 1);
            assert_int_equal(policy_runner_act(a, decisions, N, &text, &err), ERR_USAGE);
            assert_non_null(strstr(err.text, "more than the 128 of the context"));
        }
        policy_runner_free(plain);
        policy_runner_free(a);
        pool_free(o.pool);
    }
    tokenizer_use(FRY);
    buf_release(&text);
    buf_release(&dots);
}

/* A prompt longer than the context is refused with the length that will do; one sequence at a time
 * of that length decides the same. */
static void test_context_and_sequences(void **state) {
    (void)state;
    enum { N = 5 };
    struct error err;
    struct toy toy;
    struct buf text = {0};
    struct policy_decision want[N], got[N];
    toy_init(&toy, N);
    struct policy_runner *a = runner_new(&toy, 1, false);
    for (int i = 0; i < N; i++) {
        want[i] = decision_init(&text, prompts[i], fixture_adapters[i % POLICIES], 1);
        got[i] = want[i];
    }
    decide(a, want, N, &text);
    policy_runner_free(a);
    struct policy_runner_options o = {
        .temperature = 1, .max_len = 5, .fixed_len = true, .max_seqs = 1};
    a = policy_runner_new(model, &toy.e, &o, &err);
    assert_int_equal(policy_runner_act(a, got, N, &text, &err), ERR_USAGE);
    policy_runner_free(a);
    const char *figure = strstr(err.text, "raise --max-model-len to ");
    assert_non_null(figure);
    o.max_len = (int32_t)strtol(figure + 25, NULL, 10);
    assert_in_range(o.max_len, 20, 40);
    a = policy_runner_new(model, &toy.e, &o, &err);
    decide(a, got, N, &text);
    policy_runner_free(a);
    for (int i = 0; i < N; i++) {
        assert_int_equal(got[i].action, want[i].action);
        assert_memory_equal(got[i].logp, want[i].logp, sizeof got[i].logp);
    }
    buf_release(&text);
}

static void test_text_answers_are_parsed(void **state) {
    (void)state;
    enum { N = 40 };
    struct toy toy;
    struct buf text = {0};
    struct policy_decision decisions[N];
    int seen[ACTIONS] = {0}, kinds = 0;
    toy_init(&toy, 1);
    struct policy_runner *a = runner_new(&toy, 1, true);
    toy.parsed_action = 4;
    for (int i = 0; i < N; i++)
        decisions[i] = decision_init(&text, prompts[i % 3], fixture_adapters[1], (uint64_t)i);
    decide(a, decisions, N, &text);
    assert_int_equal(toy.n_parsed, N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(decisions[i].action, 4);
        assert_true(decisions[i].logp[0] == 0 && decisions[i].logp[5] == 0);
    }
    toy.parsed_action = -1;
    text.len = 0;
    for (int i = 0; i < N; i++)
        decisions[i] = decision_init(&text, prompts[i % 3], fixture_adapters[1], (uint64_t)i);
    decide(a, decisions, N, &text);
    for (int i = 0; i < N; i++) seen[decisions[i].action]++;
    for (int k = 0; k < ACTIONS; k++) kinds += seen[k] > 0;
    assert_int_equal(kinds, ACTIONS);
    policy_runner_free(a);
    buf_release(&text);
}

/* a learner that the test drives directly */

struct learner_test {
    struct toy toy;
    struct policy_runner *runner;
    struct learner *l;
    struct learner_options o;
    int tick;
};

static struct learner_options learner_options_init(const char *learn) {
    struct learner_options o = {0};
    options_default(learner_option_rows, &o);
    learner_options_set_old_defaults(&o);
    free(o.learn);
    o.learn = xstrdup(learn);
    o.warmup_steps = 0;
    return o;
}

/* Plain gradient descent: one step is the mean gradient times the rate. */
static void options_set_sgd(struct learner_options *o, double lr) {
    free(o->train.optim);
    o->train.optim = xstrdup("sgd");
    o->train.momentum = 0;
    o->train.max_grad_norm = 0;
    o->train.lr = lr;
}

/* Takes ownership of the options. */
static void learner_test_open(struct learner_test *s, struct learner_options o, double temperature,
                              int n_policies, int n_agents, struct adapter *const *adapters,
                              uint64_t seed) {
    struct error err;
    *s = (struct learner_test){.o = o};
    toy_init(&s->toy, 1);
    s->runner = runner_new(&s->toy, temperature, false);
    struct learner_config b = {.m = model,
                               .policy_runner = s->runner,
                               .temperature = temperature,
                               .n_actions = ACTIONS,
                               .n_words = n_words,
                               .n_policies = n_policies,
                               .n_agents = n_agents,
                               .adapters = adapters,
                               .seed = seed};
    s->l = learner_new(&s->o, &b, &err);
    if (!s->l) fail_msg("%s", err.text);
}

static void learner_test_close(struct learner_test *s) {
    learner_free(s->l);
    policy_runner_free(s->runner);
    options_release(learner_option_rows, &s->o);
}

static const char *learner_test_hash(const struct learner_test *s, int policy) {
    return learner_adapter(s->l, policy)->hash;
}

static void learner_test_update(struct learner_test *s) {
    struct error err;
    s->tick += (int)s->o.update_interval;
    if (learner_tick(s->l, 0, s->tick, &err) != OK) fail_msg("%s", err.text);
}

/* An episode of one decision: prompt, action and reward. */
struct decision_case {
    const char *prompt;
    int action, teacher;
    double logp, reward; /* logp 0: the probability of a uniform choice */
};

static void learner_test_episode(struct learner_test *s, int agent, const struct decision_case *v) {
    struct token_ids ids = {0};
    tokenizer_encode(model->tok, v->prompt, strlen(v->prompt), TOKENIZER_ADD_BOS, &ids);
    struct policy_decision a = {.tokens = ids.v, .n = ids.n, .action = v->action};
    for (int i = 0; i < ACTIONS; i++) a.logp[i] = -log(ACTIONS);
    if (v->logp != 0) a.logp[v->action] = v->logp;
    learner_observe_action(s->l, agent, &a, v->teacher);
    learner_observe_reward(s->l, agent, v->reward, true);
    token_ids_release(&ids);
}

/* A naive implementation of the formula, for prompts of one token each. */
enum { STATES = 5, MAX_STEPS = 40 };
struct naive_returns {
    float v[STATES]; /* the critic */
    int visits[STATES];
    struct {
        int state[MAX_STEPS], n, n_final;
        double value[MAX_STEPS + 1], reward[MAX_STEPS];
    } agent[2];
};

static void naive_finalize(struct naive_returns *r, const struct learner_options *o, int b) {
    int s = r->agent[b].n_final++, last = MIN(r->agent[b].n, s + (int)o->horizon);
    double ret = r->agent[b].value[s];
    for (int k = s; k < last; k++) {
        double delta =
            r->agent[b].reward[k] + o->discount * r->agent[b].value[k + 1] - r->agent[b].value[k];
        ret += pow(o->discount * o->gae_lambda, k - s) * delta;
    }
    float *v = &r->v[r->agent[b].state[s]];
    *v += (float)(o->critic_lr * (ret - (double)*v));
}

static void naive_observe_action(struct naive_returns *r, const struct learner_options *o, int b,
                                 int state) {
    int n = r->agent[b].n;
    double bonus = o->exploration_bonus / sqrt(++r->visits[state]);
    if (n > 0) r->agent[b].reward[n - 1] += bonus;
    r->agent[b].value[n] = (double)r->v[state];
    if (n - r->agent[b].n_final == o->horizon) naive_finalize(r, o, b);
    r->agent[b].state[n] = state;
    r->agent[b].n++;
}

static void naive_finish_episode(struct naive_returns *r, const struct learner_options *o, int b,
                                 double value) {
    r->agent[b].value[r->agent[b].n] = value;
    while (r->agent[b].n_final < r->agent[b].n) naive_finalize(r, o, b);
    r->agent[b].n = r->agent[b].n_final = 0;
}

static int float_order(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The entries of a table from `begin` to `end` other than 0, sorted. */
static void table_values(const float *table, size_t begin, size_t end, float have[STATES]) {
    int n = 0;
    for (size_t i = begin; i < end; i++) {
        if (table[i] == 0) continue;
        assert_true(n < STATES);
        have[n++] = table[i];
    }
    assert_int_equal(n, STATES);
    qsort(have, STATES, sizeof *have, float_order);
}

/* The values of the critic's table other than 0 are the values of the states. With an exploration
 * bonus the numbers of visits follow. */
static void assert_critic(const struct learner_test *s, const struct naive_returns *r) {
    struct learner_options plain = {0};
    float *table = learner_critic(s->l, 0), have[STATES], want[STATES];
    size_t n = learner_critic_bytes(&plain) / sizeof(float),
           all = learner_critic_bytes(&s->o) / sizeof(float);
    assert_int_equal(all > n, s->o.exploration_bonus > 0);
    if (all > n) {
        for (int i = 0; i < STATES; i++) want[i] = (float)r->visits[i];
        qsort(want, STATES, sizeof *want, float_order);
        table_values(table, n, all, have);
        assert_memory_equal(have, want, sizeof want);
    }
    table_values(table, 0, n, have);
    memcpy(want, r->v, sizeof want);
    qsort(want, STATES, sizeof *want, float_order);
    for (int i = 0; i < STATES; i++)
        if (fabs((double)(have[i] - want[i])) > 1e-5)
            fail_msg("a value of the baseline is %.7f, not %.7f", (double)have[i], (double)want[i]);
    free(table);
}

static void returns_compare(int horizon, int length, double lambda, bool dies, double bonus) {
    struct learner_options o = learner_options_init("gradient");
    o.horizon = horizon;
    o.gae_lambda = lambda;
    o.update_interval = 1 << 20;
    o.critic_lr = 0.3;
    o.exploration_bonus = bonus;
    struct learner_test s;
    struct naive_returns r = {0};
    struct rng rng = rng_make((uint64_t)(horizon * 100 + length), RNG_TEST, 9, 0);
    learner_test_open(&s, o, 1, 1, 2, fixture_adapters, 1);
    for (int episode = 0; episode < 4; episode++)
        for (int t = 0; t <= length; t++)
            for (int b = 0; b < 2; b++) {
                int state = (int)rng_below(&rng, STATES);
                int32_t token = 300 + state;
                struct policy_decision a = {.tokens = &token, .n = 1, .action = state};
                bool terminated = dies && t == length - 1, has_ended = t == length;
                double reward = (double)rng_normal(&rng);
                if (has_ended && !dies) {
                    naive_finish_episode(&r, &s.o, b, (double)r.v[state]);
                    learner_finish_episode(s.l, b, &a);
                }
                if (has_ended) continue;
                naive_observe_action(&r, &s.o, b, state);
                learner_observe_action(s.l, b, &a, -1);
                r.agent[b].reward[r.agent[b].n - 1] = reward;
                if (terminated) naive_finish_episode(&r, &s.o, b, 0);
                learner_observe_reward(s.l, b, reward, terminated);
            }
    assert_critic(&s, &r);
    learner_test_close(&s);
}

static void test_returns(void **state) {
    (void)state;
    static const int cases[][2] = {{3, 20}, {16, 5}, {6, 6}, {1, 9}, {5, 6}, {16, 33}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int k = 0; k < 4; k++)
            returns_compare(cases[i][0], cases[i][1], k & 1 ? 1 : 0.5, k & 2, 0);
}

/* The reward for the n-th visit of a prompt is β / √n; only the learner counts it. */
static void test_exploration_bonus(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) returns_compare(5, 12, k & 1 ? 1 : 0.5, k & 2, 0.7);
}

static struct decision_case clone_case(int i) {
    static const char *const ps[] = {"o",           "x o",           "x o f u",
                                     "x o f u o -", "x o f u o - -", "x o f u o - - e + - n x x:"};
    return (struct decision_case){
        .prompt = ps[MIN(i, 20) / 2 % 6], .teacher = i * 5 % ACTIONS, .reward = i};
}

static struct learner_options clone_options(void) {
    struct learner_options o = learner_options_init("clone");
    options_set_sgd(&o, 0.05);
    o.buffer_size = 8;
    o.batch_size = 4;
    o.replay_fraction = 1; // samples from the whole buffer
    return o;
}

/* Feeds the cases first … last - 1, then updates; returns the hash of the resulting adapter. */
static char *clone_hash(int longest_first, int first, int last) {
    struct learner_test s;
    learner_test_open(&s, clone_options(), 1, 1, 1, fixture_adapters, 3);
    struct decision_case wide = {.prompt = prompts[4]};
    for (int i = 0; i < longest_first; i++) learner_test_episode(&s, 0, &wide);
    for (int i = first; i < last; i++) {
        struct decision_case v = clone_case(i);
        learner_test_episode(&s, 0, &v);
    }
    for (int i = 0; i < 4; i++) learner_test_update(&s);
    char *hash = xstrdup(learner_test_hash(&s, 0));
    learner_test_close(&s);
    return hash;
}

static void assert_strings(char *a, char *b, bool same) {
    if (same != (strcmp(a, b) == 0)) fail_msg("'%s' and '%s'", a, b);
    free(a);
    free(b);
}

static void test_replay_buffer_drops_the_oldest(void **state) {
    (void)state;
    assert_strings(clone_hash(0, 0, 8), clone_hash(1, 0, 8),
                   true); // widened one by one, and at once
    assert_strings(clone_hash(0, 5, 13), clone_hash(0, 2, 13), true);
    assert_strings(clone_hash(0, 5, 13), clone_hash(8, 5, 13), true);
    assert_strings(clone_hash(0, 5, 13), clone_hash(21, 5, 13), true);
    assert_strings(clone_hash(0, 5, 13), clone_hash(0, 4, 12), false);
}

/* Samples come from the transitions since the last update, unless the whole buffer is chosen. */
static void test_replay_share(void **state) {
    (void)state;
    struct decision_case old = {.prompt = prompts[0], .teacher = 1}, new = {.prompt = prompts[1]};
    for (int replay = 0; replay < 2; replay++) {
        struct learner_test s, t;
        struct learner_options o = clone_options();
        o.buffer_size = 40;
        o.replay_fraction = replay;
        learner_test_open(&s, o, 1, 1, 1, fixture_adapters, 3);
        for (int i = 0; i < 16; i++) learner_test_episode(&s, 0, &old);
        learner_test_update(&s);
        struct adapter *then = adapter_retain(learner_adapter(s.l, 0));
        for (int i = 0; i < 4; i++) learner_test_episode(&s, 0, &new);
        learner_test_update(&s);
        learner_test_open(&t, clone_options(), 1, 1, 1, &then, 4);
        for (int i = 0; i < 8; i++) learner_test_episode(&t, 0, &new);
        learner_test_update(&t);
        assert_int_equal(strcmp(learner_test_hash(&s, 0), learner_test_hash(&t, 0)) == 0, !replay);
        adapter_release(then);
        learner_test_close(&s);
        learner_test_close(&t);
    }
}

/* Two policies with a decision each; returns the hash of the resulting adapter of the first. */
static char *hash_with_shared_experience(double share, const struct decision_case *others,
                                         double *critic) {
    static const struct decision_case own_case = {.prompt = "x o f u", .teacher = 1, .reward = 1};
    struct learner_test s;
    struct learner_options o = clone_options();
    o.shared_experience_fraction = share;
    learner_test_open(&s, o, 1, 2, 2, fixture_adapters, 3);
    for (int i = 0; i < 8; i++) {
        learner_test_episode(&s, 0, &own_case);
        learner_test_episode(&s, 1, others);
    }
    for (int i = 0; i < 6; i++) learner_test_update(&s);
    float *baseline = learner_critic(s.l, 0);
    for (size_t i = 0; i < learner_critic_bytes(&s.o) / sizeof(float); i++)
        *critic += fabs((double)baseline[i]);
    free(baseline);
    char *hash = xstrdup(learner_test_hash(&s, 0));
    learner_test_close(&s);
    return hash;
}

/* Transitions of other policies count only if they are shared, also for the critic. */
static void test_shared_experience(void **state) {
    (void)state;
    const struct decision_case one = {.prompt = "u u u u o f n", .teacher = 2, .reward = 5};
    const struct decision_case two = {.prompt = "u u u u o f n", .teacher = 3, .reward = 5};
    double alone = 0, shared = 0, unused = 0;
    assert_strings(hash_with_shared_experience(0, &one, &alone),
                   hash_with_shared_experience(0, &two, &unused), true);
    assert_strings(hash_with_shared_experience(1, &one, &shared),
                   hash_with_shared_experience(1, &two, &unused), false);
    if (!(shared > 1.5 * alone)) fail_msg("a baseline of %g, with others' %g", alone, shared);
}

static double probability(const struct learner_test *s, const char *prompt, int action) {
    struct policy_decision a;
    decide_one(s->runner, prompt, learner_adapter(s->l, 0), &a);
    return exp(a.logp[action]);
}

static void test_one_update_moves_the_policy(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct learner_test s;
        struct learner_options o = learner_options_init("gradient");
        int good = (int)(seed % ACTIONS), wrong = (good + 2) % ACTIONS;
        o.batch_size = 16;
        o.critic_lr = 0;
        learner_test_open(&s, o, 1, 1, 1, &fixture_adapters[seed % POLICIES], seed);
        double before = probability(&s, prompts[0], good), bad = probability(&s, prompts[0], wrong);
        for (int i = 0; i < 32; i++) {
            struct decision_case v = {.prompt = prompts[0],
                                      .action = i % 2 ? good : wrong,
                                      .logp = log(i % 2 ? before : bad),
                                      .reward = i % 2 ? 1 : -1};
            learner_test_episode(&s, 0, &v);
        }
        learner_test_update(&s);
        assert_int_equal(learner_updates(s.l), 1);
        if (!(probability(&s, prompts[0], good) > before) ||
            !(probability(&s, prompts[0], wrong) < bad))
            fail_msg("seed %d: the rewarded %g to %g, the punished %g to %g", (int)seed, before,
                     probability(&s, prompts[0], good), bad, probability(&s, prompts[0], wrong));
        learner_test_close(&s);
    }
}

static void test_behaviour_cloning(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct learner_test s;
        int right = (int)(seed % ACTIONS);
        learner_test_open(&s, learner_options_init("clone"), 1, 1, 1,
                          &fixture_adapters[seed % POLICIES], seed);
        double before = probability(&s, prompts[1], right);
        for (int i = 0; i < 8; i++) {
            struct decision_case v = {.prompt = prompts[1],
                                      .action = (right + 1) % ACTIONS,
                                      .teacher = right,
                                      .reward = -1};
            learner_test_episode(&s, 0, &v);
        }
        learner_test_update(&s);
        assert_true(probability(&s, prompts[1], right) > before);
        learner_test_close(&s);
    }
}

/* The parameters of the loss of one transition. */
struct loss_case {
    double temperature, ratio, old, advantage, entropy, clip;
    int action;
};

static double loss_case_value(const struct learner_test *s, const struct loss_case *k,
                              struct adapter *a) {
    struct policy_decision decision;
    decide_one(s->runner, prompts[0], a, &decision);
    double ratio = exp(decision.logp[k->action] - k->old), h = 0;
    double bound = fmin(fmax(ratio, 1 - k->clip), 1 + k->clip);
    for (int i = 0; i < ACTIONS; i++) h -= exp(decision.logp[i]) * decision.logp[i];
    return -fmin(ratio * k->advantage, bound * k->advantage) - k->entropy * h;
}

static struct adapter *adapter_moved(const struct adapter *a, const double *direction,
                                     double step) {
    float *data = xcalloc(a->n_data, sizeof *data);
    for (size_t i = 0; i < a->n_data; i++)
        data[i] = (float)((double)a->data[i] + step * direction[i]);
    return adapter_from_owned_data(&a->shape, &a->config, data, NULL);
}

static double slope(const struct learner_test *s, const struct loss_case *k,
                    const double *direction) {
    double sum = 0, loss[2];
    for (size_t i = 0; i < fixture_adapters[0]->n_data; i++) sum += direction[i] * direction[i];
    double step = 0.003 / sqrt(sum);
    for (int side = 0; side < 2; side++) {
        struct adapter *a = adapter_moved(fixture_adapters[0], direction, side ? step : -step);
        loss[side] = loss_case_value(s, k, a);
        adapter_release(a);
    }
    return (loss[1] - loss[0]) / (2 * step);
}

/* One plain gradient step from fixture_adapters[0], after sixteen transitions of which the buffer
 * holds eight; the gradient is stored in `gradient`. The running square of the critic's errors
 * includes all sixteen. */
static void loss_case_learn(struct learner_test *s, struct loss_case *k, double *gradient) {
    enum { LR = 1 };
    struct policy_decision now;
    struct learner_options o = learner_options_init("gradient");
    double square = 0;
    options_set_sgd(&o, LR);
    o.buffer_size = 8;
    o.critic_lr = 0;
    o.entropy_coef = k->entropy;
    o.clip_range = k->clip;
    learner_test_open(s, o, k->temperature, 1, 1, fixture_adapters, 5);
    decide_one(s->runner, prompts[0], fixture_adapters[0], &now);
    k->old = now.logp[k->action] - log(k->ratio);
    for (int i = 0; i < 16; i++) {
        double reward = k->advantage * (i < 8 ? 0.5 : 1);
        struct decision_case v = {
            .prompt = prompts[0], .action = k->action, .logp = k->old, .reward = reward};
        square += (i ? 0.01 : 1) * (reward * reward - square);
        learner_test_episode(s, 0, &v);
    }
    k->advantage /= sqrt(square);
    learner_test_update(s);
    const struct adapter *after = learner_adapter(s->l, 0);
    for (size_t i = 0; i < after->n_data; i++)
        gradient[i] = ((double)fixture_adapters[0]->data[i] - (double)after->data[i]) / LR;
}

static void gradient_compare(enum tokenizer_name tokenizer) {
    static const struct loss_case tasks[] = {
        {.temperature = 1, .ratio = 1, .advantage = 2, .clip = 0.2, .action = 1},
        {.temperature = 1, .ratio = 1.15, .advantage = 1, .clip = 0.2, .action = 2, .entropy = 0.1},
        {.temperature = 0.6, .ratio = 0.85, .advantage = 3, .clip = 0.2, .action = 0},
        {.temperature = 1, .ratio = 0.9, .advantage = -1, .clip = 0.2, .action = 3, .entropy = 0.5},
        {.temperature = 2, .ratio = 1.9, .advantage = -1, .clip = 0.2, .action = 4},
        {.temperature = 1, .ratio = 0.4, .advantage = 2, .clip = 0.2, .action = 5},
        {.temperature = 1, .ratio = 2, .advantage = 2, .clip = 0.2, .action = 5, .entropy = 0.3},
    };
    size_t n = fixture_adapters[0]->n_data;
    double *g = xcalloc(n, sizeof *g), *d = xcalloc(n, sizeof *d);
    tokenizer_use(tokenizer);
    for (size_t i = 0; i < ARRAY_LEN(tasks); i++) {
        struct loss_case k = tasks[i];
        struct learner_test s;
        struct rng rng = rng_make(i, RNG_TEST, 4, 0);
        double gg = 0, gd = 0;
        loss_case_learn(&s, &k, g);
        for (size_t j = 0; j < n; j++) gg += g[j] * g[j];
        assert_true(gg > 0);
        for (size_t j = 0; j < n; j++) {
            d[j] = g[j] + (double)rng_normal(&rng) * sqrt(gg / (double)n);
            gd += g[j] * d[j];
        }
        double along = slope(&s, &k, g), across = slope(&s, &k, d);
        if (fabs(along - gg) > 0.01 * gg || fabs(across - gd) > 0.02 * gg)
            fail_msg("task %zu: slopes %g and %g, of the gradient %g and %g", i, along, across, gg,
                     gd);
        learner_test_close(&s);
    }
    tokenizer_use(FRY);
    free(g);
    free(d);
}

static void test_gradient_equals_the_loss_gradient(void **state) {
    (void)state;
    for (int k = FRY; k <= SPM; k++) gradient_compare((enum tokenizer_name)k);
}

/* The loss of the word in word_learn. */
static double word_loss(const struct learner_test *s, double old, double advantage,
                        struct adapter *a) {
    struct policy_decision word;
    struct buf text = {0};
    double h = 0;
    word = decision_init(&text, prompts[1], a, 1);
    word.says_word = true;
    decide(s->runner, &word, 1, &text);
    buf_release(&text);
    for (int i = 0; i < n_words; i++) h -= exp(word.logp[i]) * word.logp[i];
    return -exp(word.logp[2] - old) * advantage - s->o.entropy_coef * h;
}

/* One plain gradient step from fixture_adapters[0] after twelve ticks, each with an action whose
 * loss is constant, because it is clipped, and word 2. Returns the word's log-probability. */
static double word_learn(struct learner_test *s, double *gradient) {
    struct policy_decision action, word;
    struct learner_options o = learner_options_init("gradient");
    struct buf text = {0};
    options_set_sgd(&o, 1);
    o.critic_lr = 0;
    o.entropy_coef = 0;
    learner_test_open(s, o, 1, 1, 1, fixture_adapters, 5);
    for (int i = 0; i < 12; i++) {
        decide_one(s->runner, prompts[0], fixture_adapters[0], &action);
        action.logp[action.action] -= log(1.5);
        learner_observe_action(s->l, 0, &action, -1);
        text.len = 0;
        word = decision_init(&text, prompts[1], fixture_adapters[0], 1);
        word.says_word = true;
        decide(s->runner, &word, 1, &text);
        word.action = 2;
        learner_observe_word(s->l, 0, &word);
        learner_observe_reward(s->l, 0, 1, true);
    }
    buf_release(&text);
    learner_test_update(s);
    const struct adapter *after = learner_adapter(s->l, 0);
    for (size_t i = 0; i < after->n_data; i++)
        gradient[i] = (double)fixture_adapters[0]->data[i] - (double)after->data[i];
    return word.logp[2];
}

/* A batch has four decisions, of which m = 1 to 4 are words: the gradient is m / 4 of that of the
 * word's loss, along the gradient and in another direction. */
static void word_gradient_compare(enum tokenizer_name tokenizer) {
    struct learner_test s;
    size_t n = fixture_adapters[0]->n_data;
    double *g = xcalloc(n, sizeof *g), *d = xcalloc(n, sizeof *d), gg = 0, gd = 0, slopes[2];
    n_words = 4;
    tokenizer_use(tokenizer);
    double old = word_learn(&s, g);
    struct rng rng = rng_make(1, RNG_TEST, 4, 0);
    for (size_t i = 0; i < n; i++) gg += g[i] * g[i];
    assert_true(gg > 0);
    for (size_t i = 0; i < n; i++) {
        d[i] = g[i] + (double)rng_normal(&rng) * sqrt(gg / (double)n);
        gd += g[i] * d[i];
    }
    for (int k = 0; k < 2; k++) {
        double norm = 0, loss[2];
        const double *direction = k ? d : g;
        for (size_t i = 0; i < n; i++) norm += direction[i] * direction[i];
        for (int side = 0; side < 2; side++) {
            double step = (side ? 0.01 : -0.01) / sqrt(norm);
            struct adapter *a = adapter_moved(fixture_adapters[0], direction, step);
            loss[side] = word_loss(&s, old, 1, a);
            adapter_release(a);
        }
        slopes[k] = (loss[1] - loss[0]) / (0.02 / sqrt(norm));
    }
    double m = 4 * gg / slopes[0];
    if (fabs(m - round(m)) > 0.03 || m < 0.9 || m > 4.1 || fabs(slopes[1] * m / 4 - gd) > 0.02 * gg)
        fail_msg("slopes %g and %g of the gradient %g and %g", slopes[0], slopes[1], gg, gd);
    learner_test_close(&s);
    n_words = 0;
    tokenizer_use(FRY);
    free(g);
    free(d);
}

static void test_gradient_of_words(void **state) {
    (void)state;
    for (int k = FRY; k <= SPM; k++) word_gradient_compare((enum tokenizer_name)k);
}

static void test_clipped_side_has_no_gradient(void **state) {
    (void)state;
    double *g = xcalloc(fixture_adapters[0]->n_data, sizeof *g);
    for (int side = 0; side < 2; side++) {
        struct learner_test s;
        struct loss_case k = {.temperature = 1,
                              .ratio = side ? 1.5 : 0.6,
                              .advantage = side ? 1 : -1,
                              .clip = 0.2,
                              .action = 2};
        loss_case_learn(&s, &k, g);
        assert_int_equal(learner_updates(s.l), 1);
        assert_string_equal(learner_test_hash(&s, 0), fixture_adapters[0]->hash);
        learner_test_close(&s);
    }
    free(g);
}

/* Three policies, eight decisions each and an update, three times; those of policy 1 were sampled
 * with probability exp(rare). */
static void policies_train(struct learner_test *s, struct adapter *second, double rare) {
    struct adapter *adapters[3] = {fixture_adapters[0], second, fixture_adapters[2]};
    learner_test_open(s, learner_options_init("gradient"), 1, 3, 3, adapters, 6);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 24; i++) {
            struct decision_case v = {.prompt = prompts[i % 5],
                                      .action = i % ACTIONS,
                                      .logp = i % 3 == 1 ? rare : -1.5,
                                      .reward = i % 4 - 1};
            learner_test_episode(s, i % 3, &v);
        }
        learner_test_update(s);
    }
}

static void assert_neighbours_equal(const struct learner_test *a, const struct learner_test *b) {
    assert_true(learner_updates(b->l) > 0);
    for (int i = 0; i < 3; i += 2) {
        assert_string_equal(learner_test_hash(a, i), learner_test_hash(b, i));
        assert_string_not_equal(learner_test_hash(a, i), fixture_adapters[i]->hash);
        assert_int_equal(learner_health(b->l, i).rollbacks, 0);
    }
}

/* A policy with non-finite weights does not change what the other policies learn. */
static void nonfinite_policies_compare(enum tokenizer_name tokenizer) {
    struct learner_test sound, broken;
    double *along = xcalloc(fixture_adapters[1]->n_data, sizeof *along);
    for (size_t i = 0; i < fixture_adapters[1]->n_data; i++) along[i] = 1e30;
    tokenizer_use(tokenizer);
    struct adapter *huge = adapter_moved(fixture_adapters[1], along, 1);
    policies_train(&sound, fixture_adapters[1], -1.5);
    policies_train(&broken, huge, -1.5);
    assert_neighbours_equal(&sound, &broken);
    assert_int_equal(learner_health(sound.l, 1).rollbacks, 0);
    assert_int_equal(learner_health(broken.l, 1).rollbacks, 3);
    assert_string_equal(learner_test_hash(&broken, 1), huge->hash);
    learner_test_close(&broken);
    adapter_release(huge);
    free(along);
    int rolled_back = 0;
    for (int rare = -60; rare > -92; rare -= 2) { // gradients beyond the range of a float
        policies_train(&broken, fixture_adapters[1], rare);
        assert_neighbours_equal(&sound, &broken);
        rolled_back += learner_health(broken.l, 1).rollbacks > 0;
        learner_test_close(&broken);
    }
    assert_true(rolled_back > 0 && rolled_back < 16);
    learner_test_close(&sound);
    tokenizer_use(FRY);
}

static void test_only_nonfinite_policies_are_rolled_back(void **state) {
    (void)state;
    nonfinite_policies_compare(FRY);
    nonfinite_policies_compare(BPE);
}

/* A tick of one policy with one agent, with finite log-probabilities or not. */
static void learner_test_tick(struct learner_test *s, bool is_finite) {
    struct error err;
    int32_t token = 300 + s->tick % 7;
    struct policy_decision a = {.tokens = &token, .n = 1, .action = s->tick % ACTIONS};
    for (int i = 0; i < ACTIONS; i++) a.logp[i] = is_finite ? -log(ACTIONS) : (double)NAN;
    learner_observe_action(s->l, 0, &a, -1);
    learner_observe_reward(s->l, 0, s->tick % 3, false);
    s->tick++;
    if (learner_tick(s->l, 0, s->tick, &err) != OK) fail_msg("%s", err.text);
}

/* A decision without finite log-probabilities is rolled back and never sampled later. */
static void test_nonfinite_decision(void **state) {
    (void)state;
    struct learner_test s;
    struct learner_options o = learner_options_init("gradient");
    o.update_interval = 1;
    o.replay_fraction = 1;
    learner_test_open(&s, o, 1, 1, 1, fixture_adapters, 2);
    while (s.tick < 100) learner_test_tick(&s, s.tick != 40);
    struct policy_health h = learner_health(s.l, 0);
    assert_int_equal(h.rollbacks, 1);
    assert_true(isfinite(h.entropy) && h.entropy > 1);
    struct learner_test fresh; // a learner that begins after it
    o = learner_options_init("gradient");
    o.update_interval = 1;
    o.replay_fraction = 1;
    learner_test_open(&fresh, o, 1, 1, 1, fixture_adapters, 2);
    for (fresh.tick = 41; fresh.tick < 100;) learner_test_tick(&fresh, true);
    assert_string_equal(learner_test_hash(&s, 0), learner_test_hash(&fresh, 0));
    assert_string_not_equal(learner_test_hash(&s, 0), fixture_adapters[0]->hash);
    learner_test_close(&s);
    learner_test_close(&fresh);
}

/* A hundred ticks at rate 0 of four policies: a healthy one, one that repeats an action, one with
 * low entropy, one with constant reward. */
static void test_collapse_is_reported(void **state) {
    (void)state;
    struct learner_test s;
    struct learner_options o = learner_options_init("gradient");
    o.train.lr = 0;
    learner_test_open(&s, o, 1, 4, 4, fixture_adapters, 6);
    for (s.tick = 1; s.tick <= 100; s.tick++) {
        struct error err;
        for (int b = 0; b < 4; b++) {
            int32_t token = 300;
            struct policy_decision a = {
                .tokens = &token, .n = 1, .action = b == 1 ? 2 : s.tick % ACTIONS};
            for (int i = 0; i < ACTIONS; i++) {
                double p = b == 2 ? (i == 0 ? 1 - 5e-6 : 1e-6) : 1.0 / ACTIONS;
                a.logp[i] = log(p);
            }
            learner_observe_action(s.l, b, &a, -1);
            learner_observe_reward(s.l, b, b == 3 ? 2 : s.tick % 2, false);
        }
        assert_int_equal(learner_tick(s.l, 0, s.tick, &err), OK);
    }
    for (int b = 0; b < 4; b++) {
        struct policy_health h = learner_health(s.l, b);
        assert_int_equal(h.decisions, 100);
        assert_int_equal(h.collapsed, b != 0);
        assert_true(fabs(h.reward - (b == 3 ? 2 : 0.5)) < 1e-12);
        assert_true(fabs(h.spread - (b == 3 ? 0 : 0.5)) < 1e-12);
        assert_true(fabs(h.most_repeated - (b == 1 ? 1 : 0.17)) < 1e-12);
        if (b != 2) assert_true(fabs(h.entropy - log(ACTIONS)) < 1e-9);
        assert_int_equal(h.rollbacks, 0); // no better snapshot exists
    }
    learner_test_close(&s);
}

/* simulations */

struct simulation_test {
    struct simulation_options o;
    struct world_rules rules;
    struct grid_env grids[2];
    struct toy toys[2];
    struct environment envs[2], *list[2];
    struct pool *pool;
    struct simulation *simulation;
};

static struct simulation_options simulation_options_init(const char *learn) {
    struct simulation_options o = {0};
    options_default(simulation_option_rows, &o);
    options_default(learner_option_rows, &o.learn);
    simulation_options_set_old_defaults(&o);
    free(o.learn.learn);
    o.learn.learn = xstrdup(learn);
    o.learn.train.r = 2;
    o.learn.update_interval = 5;
    o.n_envs = 2;
    o.steps = 45;
    o.seed = 7;
    o.eval_maps = 1;
    o.elites = 1;
    return o;
}

static void simulation_start(struct simulation_test *w) {
    struct error err;
    w->simulation =
        simulation_new(model, &w->o, w->list, fixture_adapters, POLICIES, w->pool, &err);
    if (!w->simulation) fail_msg("%s", err.text);
}

/* Takes ownership of the options. `toy`: agents that do not interact. */
static void simulation_test_open(struct simulation_test *w, struct simulation_options o, bool toy,
                                 int threads) {
    struct error err;
    *w = (struct simulation_test){.o = o, .pool = pool_new(threads)};
    if (world_rules_load(&w->rules, "repaired", &err) != OK) fail_msg("%s", err.text);
    w->rules.vocabulary = MAX(n_words - 1, 0);
    for (int i = 0; i < o.n_envs; i++) {
        toy_init(&w->toys[i], POLICIES);
        w->toys[i].dies_at[2] = 17 + i;
        w->grids[i] = (struct grid_env){
            .rules = &w->rules, .teacher = world_policy_find("reflex"), .n_agents = POLICIES};
        w->envs[i] = toy ? w->toys[i].e : grid_env_as_environment(&w->grids[i]);
        w->list[i] = &w->envs[i];
    }
    simulation_start(w);
}

static void simulation_test_close(struct simulation_test *w) {
    simulation_free(w->simulation);
    pool_free(w->pool);
    world_rules_release(&w->rules);
    options_release(learner_option_rows, &w->o.learn);
    options_release(simulation_option_rows, &w->o);
}

/* Runs a generation, or its first ticks. Appends the actions to `log_text`. */
static void generation_run(struct simulation_test *w, int ticks, struct buf *log_text) {
    struct error err;
    int n = 1, t = 0;
    if (simulation_begin_generation(w->simulation, NULL, &err) != OK) fail_msg("%s", err.text);
    while (t++ < ticks && (n = simulation_step(w->simulation, &err)) > 0)
        for (int b = 0; b < POLICIES * (int)w->o.n_envs; b++)
            buf_printf(log_text, "%d ", simulation_actions(w->simulation)[b]);
    if (n < 0) fail_msg("%s", err.text);
    if (ticks <= w->o.steps) return;
    simulation_end_generation(w->simulation);
    buf_puts(log_text, "\n");
}

static void evaluation_log(struct simulation_test *w, struct buf *log_text) {
    struct error err;
    struct episode_stats out[4];
    assert_true(w->o.eval_maps <= 4);
    if (simulation_evaluate(w->simulation, out, &err) != OK) fail_msg("%s", err.text);
    for (int i = 0; i < w->o.eval_maps; i++)
        buf_printf(log_text, "held out: %a %a\n", out[i].fitness, out[i].reward);
}

/* Appends the records of the policies; their health only with `health`. */
static void policies_log(const struct simulation *l, bool health, struct buf *log_text) {
    for (int i = 0; i < simulation_n_policies(l); i++) {
        json_t *v = policy_record_json(simulation_policy(l, i));
        assert_non_null(v);
        if (!health) json_object_del(v, "health");
        char *text = json_canonical(v);
        buf_printf(log_text, "%s\n", text);
        free(text);
        json_decref(v);
    }
    buf_printf(log_text, "%d generations, %lld decisions\n", simulation_generations(l),
               (long long)simulation_decisions(l));
}

enum { ALL_TICKS = 1 << 20 };
static bool low_memory; /* the option of simulations that simulation_log creates */
static char *simulation_log(const char *learn, double lr, int threads, bool health) {
    struct simulation_test w;
    struct buf log_text = {0};
    struct simulation_options o = simulation_options_init(learn);
    o.learn.train.lr = lr;
    o.low_memory = low_memory;
    simulation_test_open(&w, o, false, threads);
    for (int g = 0; g < 2; g++) {
        generation_run(&w, ALL_TICKS, &log_text);
        policies_log(w.simulation, health, &log_text);
        evaluation_log(&w, &log_text);
    }
    simulation_test_close(&w);
    return log_text.data;
}

/* In a world with a channel the policies say words, which others hear; threads change nothing. */
static void test_words_in_a_world(void **state) {
    (void)state;
    n_words = 4;
    char *one = simulation_log("gradient", 0.01, 1, true),
         *two = simulation_log("gradient", 0.01, 2, true),
         *es = simulation_log("es", 0.01, 1, true);
    n_words = 0;
    for (int k = 0; k < 2; k++) { // action + 6 · word
        const char *log_text = k ? es : one;
        bool spoke = false;
        for (int i = ACTIONS; i < 4 * ACTIONS; i++) {
            char number[16];
            snprintf(number, sizeof number, " %d ", i);
            spoke |= strstr(log_text, number) != NULL;
        }
        assert_true(spoke);
    }
    assert_strings(one, two, true);
    free(es);
}

/* Statistics of three agents in which word 1 means a load: with a code, and with only habits. */
static void language_check(bool code) {
    struct world_rules r;
    struct error err;
    struct world *w = xcalloc(1, sizeof *w);
    struct language_stats *s = language_stats_new();
    struct rng rng = rng_make(code, RNG_TEST, 12, 0);
    assert_int_equal(world_rules_load(&r, "repaired", &err), OK);
    world_reset(w, &r, 3, 1);
    for (int t = 0; t < 400; t++) {
        int16_t actions[3];
        for (int i = 0; i < 3; i++) {
            bool loaded = rng_below(&rng, 10) < (i ? 7 : 1);
            w->agents[i].holds = loaded ? HOLDS_FOOD : HOLDS_NOTHING;
            int word = code ? loaded : i > 0;
            if (rng_below(&rng, 5) == 0) word = (int)rng_below(&rng, 2);
            actions[i] = (int16_t)(MOVE_EAST + WORLD_N_ACTIONS * word);
        }
        language_stats_add(s, w, &r, actions);
    }
    json_t *v = language_stats_json(s), *load = json_array_get(json_object_get(v, "pairs"), 1);
    double bits = json_get_number(load, "bits"), p = json_get_number(load, "p");
    assert_int_equal(json_integer_value(json_object_get(v, "samples")), 1200);
    assert_true(bits > 0.05);
    assert_true(code ? bits > 2 * json_get_number(load, "shuffled_95") && p < 0.01 : p > 0.05);
    json_decref(v);
    language_stats_free(s);
    world_rules_release(&r);
    free(w);
}

static void test_language(void **state) {
    (void)state;
    language_check(true);
    language_check(false);
}

static void test_rate_zero_is_frozen(void **state) {
    (void)state;
    assert_strings(simulation_log("none", 0, 1, false), simulation_log("gradient", 0, 1, false),
                   true);
    assert_strings(simulation_log("none", 0, 1, false), simulation_log("clone", 0, 1, false), true);
    assert_strings(simulation_log("none", 0, 1, false), simulation_log("gradient", 0.01, 1, false),
                   false);
}

static void test_threads_change_nothing(void **state) {
    (void)state;
    assert_strings(simulation_log("gradient", 0.01, 1, true),
                   simulation_log("gradient", 0.01, 2, true), true);
    assert_strings(simulation_log("clone", 0.01, 1, true), simulation_log("clone", 0.01, 2, true),
                   true);
}

/* Policies whose actions are several tokens act, say words and learn, with any number of threads
 * and in small memory. */
static void test_tokenizers_in_a_world(void **state) {
    (void)state;
    n_words = 4;
    for (int k = BYTES; k <= BPE; k++) {
        tokenizer_use((enum tokenizer_name)k);
        for (int small = 0; small < 2; small++) {
            low_memory = small;
            assert_strings(simulation_log("gradient", 0.01, 1, true),
                           simulation_log("gradient", 0.01, 2, true), true);
            assert_strings(simulation_log("gradient", 0.01, 1, false),
                           simulation_log("gradient", 0, 1, false), false);
            assert_strings(simulation_log("clone", 0.01, 1, true),
                           simulation_log("gradient", 0.01, 1, true), false);
        }
        low_memory = false;
        assert_strings(simulation_log("none", 0, 1, false), simulation_log("gradient", 0, 1, false),
                       true);
    }
    n_words = 0;
    tokenizer_use(FRY);
}

static char *path_in_folder(const char *name) {
    return path_join(folder, name);
}

static void state_save(const struct simulation *l, const char *dir) {
    struct error err;
    json_t *extra = json_pack("{s:s}", "mine", "too");
    if (simulation_save(l, dir, extra, &err) != OK) fail_msg("%s", err.text);
    json_decref(extra);
    for (int i = 0; i < simulation_n_policies(l); i++) {
        const struct policy_record *m = simulation_policy(l, i);
        char *path = simulation_policy_path(dir, m->adapter->hash, &err);
        struct adapter *a = adapter_load(path, &m->adapter->shape, &err);
        if (!a) fail_msg("%s", err.text);
        assert_true(*json_get_string(a->lineage, "fitness") != 0);
        assert_string_equal(json_get_string(a->lineage, "parents"),
                            json_get_string(m->adapter->lineage, "parents"));
        adapter_release(a);
        free(path);
    }
}

static void state_load(struct simulation *l, const char *dir) {
    struct error err;
    json_t *state = simulation_read_state(dir, &err);
    if (!state || simulation_load(l, dir, state, &err) != OK) fail_msg("%s", err.text);
    assert_string_equal(json_get_string(json_object_get(state, "extra"), "mine"), "too");
    json_decref(state);
}

/* Four generations; each ends with a save and continues in another object. Before the generations
 * in `killed` an object runs some ticks and is discarded. */
static char *interrupted_log(const char *dir, const char *killed) {
    struct simulation_test w;
    struct buf log_text = {0}, lost = {0};
    struct simulation_options o = simulation_options_init("gradient");
    o.carry_elite_stats = true;
    o.mutation_rate = 0.5;
    simulation_test_open(&w, o, false, 1);
    for (int g = 0; g < 4; g++) {
        for (int k = 0; dir && g > 0 && k < 1 + (killed[g] == 'x'); k++) {
            simulation_free(w.simulation);
            simulation_start(&w);
            state_load(w.simulation, dir);
            if (killed[g] == 'x' && k == 0) generation_run(&w, 23, &lost);
        }
        generation_run(&w, ALL_TICKS, &log_text);
        policies_log(w.simulation, true, &log_text);
        if (dir) state_save(w.simulation, dir);
    }
    simulation_test_close(&w);
    buf_release(&lost);
    return log_text.data;
}

static int count_entries(const char *path, const char *prefix) {
    int n = 0;
    DIR *d = opendir(path);
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.' && strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    closedir(d);
    return n;
}

static void test_interruptions_change_nothing(void **state) {
    (void)state;
    char *dir = path_in_folder("interrupted"), *minds = path_join(dir, "minds");
    assert_strings(interrupted_log(NULL, "----"), interrupted_log(dir, "----"), true);
    assert_strings(interrupted_log(NULL, "----"), interrupted_log(dir, "-xx-"), true);
    assert_int_equal(count_entries(minds, ""),
                     POLICIES); // fixture_adapters that no state names are removed
    assert_int_equal(count_entries(dir, "critics-"), 1);
    free(minds);
    free(dir);
}

/* The mean reward of an agent in the last of three generations of 200 ticks in the toy environment,
 * with the default options. */
static double reward_with_defaults(char *learn) {
    struct simulation_test w;
    struct buf log_text = {0};
    struct simulation_options o = {0};
    double sum = 0;
    options_default(simulation_option_rows, &o);
    options_default(learner_option_rows, &o.learn);
    free(o.learn.learn);
    o.learn.learn = xstrdup(learn);
    o.n_envs = 2;
    o.steps = 200;
    o.seed = 3;
    simulation_test_open(&w, o, true, 1);
    for (int g = 0; g < 3; g++) generation_run(&w, ALL_TICKS, &log_text);
    for (int i = 0; i < simulation_n_policies(w.simulation); i++)
        sum += simulation_policy(w.simulation, i)->outcome.reward;
    sum /= simulation_n_policies(w.simulation);
    simulation_test_close(&w);
    buf_release(&log_text);
    return sum;
}

static void test_defaults_learn(void **state) {
    (void)state;
    double learned = reward_with_defaults("gradient"), untrained = reward_with_defaults("none");
    if (!(learned > untrained + 10)) fail_msg("reward %g, untrained %g", learned, untrained);
}

/* the curriculum */

/* Small maps on which random agents deliver: food grows on every cell in every tick. */
static void curriculum_test_open(struct simulation_test *w) {
    struct simulation_options o = simulation_options_init("gradient");
    o.curriculum = 4;
    o.steps = 220;
    o.learn.update_interval = 50;
    o.learn.exploration_bonus = 0.5;
    simulation_test_open(w, o, false, 1);
    w->rules.size = 12;
    w->rules.food = 200;
    w->rules.food_every = 1;
    simulation_free(w->simulation);
    for (int i = 0; i < o.n_envs; i++) w->envs[i] = grid_env_as_environment(&w->grids[i]);
    simulation_start(w);
}

static double mean_delivered(const struct simulation *l) {
    double sum = 0;
    for (int i = 0; i < POLICIES; i++) sum += simulation_policy(l, i)->outcome.delivered / POLICIES;
    return sum;
}

/* Maps grow after each generation with enough deliveries, up to their full size; held-out maps have
 * the full size. With `dir` each generation is continued in another object. */
static char *curriculum_log(const char *dir) {
    struct simulation_test w;
    struct buf log_text = {0};
    int size = 4, grown = 0;
    curriculum_test_open(&w);
    for (int g = 0; g < 4; g++) {
        if (dir && g > 0) {
            simulation_free(w.simulation);
            simulation_start(&w);
            state_load(w.simulation, dir);
        }
        assert_int_equal(simulation_map_size(w.simulation), size);
        generation_run(&w, ALL_TICKS, &log_text);
        assert_int_equal(w.grids[0].w.size, size ? size : 12);
        bool grows = size && mean_delivered(w.simulation) >= 3;
        if (grows) size = size + 4 < 12 ? size + 4 : 0;
        grown += grows;
        buf_printf(&log_text, "%d\n", size);
        policies_log(w.simulation, true, &log_text);
        evaluation_log(&w, &log_text);
        assert_int_equal(w.grids[0].w.size, 12);
        if (dir) state_save(w.simulation, dir);
    }
    assert_true(grown >= 1);
    simulation_test_close(&w);
    return log_text.data;
}

static void test_curriculum(void **state) {
    (void)state;
    char *dir = path_in_folder("curriculum");
    assert_strings(curriculum_log(NULL), curriculum_log(dir), true);
    free(dir);
}

/* Maps keep their full size without learning, without the option and where they have no size. */
static void test_without_curriculum(void **state) {
    (void)state;
    for (int k = 0; k < 3; k++) {
        struct simulation_test w;
        struct simulation_options o = simulation_options_init(k == 0 ? "none" : "gradient");
        o.curriculum = k == 1 ? 0 : 8;
        simulation_test_open(&w, o, k == 2, 1);
        assert_int_equal(simulation_map_size(w.simulation), 0);
        simulation_test_close(&w);
    }
}

/* Learning rates that make all weights non-finite: all policies are rolled back repeatedly, and the
 * result can be saved and loaded. */
static void test_rate_that_makes_all_nonfinite(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    struct simulation_options o = simulation_options_init("gradient");
    char *dir = path_in_folder("broken");
    o.learn.train.lr = 1e30;
    o.learn.warmup_steps = 0;
    o.learn.batch_size = 2;
    o.steps = 120;
    o.breed = false;
    simulation_test_open(&w, o, true, 1);
    generation_run(&w, ALL_TICKS, &log_text);
    int rollbacks = 0;
    for (int i = 0; i < POLICIES; i++) {
        const struct policy_record *m = simulation_policy(w.simulation, i);
        rollbacks += m->health.rollbacks;
        assert_true(isfinite(m->health.entropy));
        for (size_t k = 0; k < m->adapter->n_data; k++) assert_true(isfinite(m->adapter->data[k]));
    }
    assert_true(rollbacks >= POLICIES);
    state_save(w.simulation, dir);
    simulation_free(w.simulation);
    simulation_start(&w);
    state_load(w.simulation, dir);
    simulation_test_close(&w);
    buf_release(&log_text);
    free(dir);
}

/* One adapter of infinities among others, in an environment without interaction: the run continues,
 * and the other policies are the same as next to a healthy one. */
static void test_nonfinite_policy_does_not_change_others(void **state) {
    (void)state;
    struct adapter *sound = fixture_adapters[1], *after[2][POLICIES] = {0};
    double *along = xcalloc(sound->n_data, sizeof *along);
    for (size_t i = 0; i < sound->n_data; i++) along[i] = INFINITY;
    for (int k = 0; k < 2; k++) {
        struct simulation_test w;
        struct buf log_text = {0};
        struct simulation_options o = simulation_options_init("gradient");
        o.n_envs = 1;
        if (k) fixture_adapters[1] = adapter_moved(sound, along, 1);
        simulation_test_open(&w, o, true, 1);
        generation_run(&w, ALL_TICKS, &log_text);
        for (int i = 0; i < POLICIES; i++) {
            const struct policy_record *m = simulation_policy(w.simulation, i);
            int policy = m->name[3] - '0';
            after[k][policy] = adapter_retain(m->adapter);
            assert_int_equal(m->health.rollbacks > 0, k == 1 && policy == 1);
        }
        simulation_test_close(&w);
        buf_release(&log_text);
        if (k) adapter_release(fixture_adapters[1]);
        fixture_adapters[1] = sound;
    }
    for (int i = 0; i < POLICIES; i++) {
        if (i != 1) assert_string_equal(after[0][i]->hash, after[1][i]->hash);
        if (i != 1) assert_string_not_equal(after[0][i]->hash, fixture_adapters[i]->hash);
        adapter_release(after[0][i]);
        adapter_release(after[1][i]);
    }
    free(along);
}

/* Generations shorter than the health interval end with a health check. */
static void test_health_of_a_short_generation(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    struct simulation_options o = simulation_options_init("gradient");
    o.learn.train.lr = 0;
    o.steps = 20;
    o.n_envs = 1;
    simulation_test_open(&w, o, true, 1);
    generation_run(&w, ALL_TICKS, &log_text);
    for (int i = 0; i < POLICIES; i++) {
        const struct policy_record *m = simulation_policy(w.simulation, i);
        assert_int_equal(m->health.decisions, m->name[3] == '2' ? 17 : 20);
        assert_true(m->health.entropy > 0 && m->health.spread > 0);
    }
    simulation_test_close(&w);
    buf_release(&log_text);
}

/* breeding */

/* A generation and its policies at the end. */
struct parents {
    struct policy_record v[POLICIES];
};

static struct parents parents_copy(const struct simulation *l) {
    struct parents p;
    for (int i = 0; i < POLICIES; i++) {
        p.v[i] = *simulation_policy(l, i);
        adapter_retain(p.v[i].adapter);
    }
    return p;
}

static void parents_release(struct parents *p) {
    for (int i = 0; i < POLICIES; i++) adapter_release(p->v[i].adapter);
}

static const struct policy_record *parent_find(const struct parents *p, const char *name) {
    for (int i = 0; i < POLICIES; i++)
        if (strcmp(p->v[i].name, name) == 0) return &p->v[i];
    fail_msg("no parent '%s'", name);
    return NULL;
}

/* ΔW of a child is the fitness-weighted mean of its parents' ΔW, with the same weighted norm. */
static void assert_child(const struct parents *p, const struct policy_record *c) {
    struct error err;
    const struct policy_record *a = parent_find(p, c->parents[0]),
                               *b = parent_find(p, c->parents[1]);
    assert_ptr_not_equal(a, b);
    assert_true(a < &p->v[2] && b < &p->v[2]);
    double f = a->outcome.fitness, g = b->outcome.fitness;
    f = fmax(f, 0), g = fmax(g, 0);
    double ratio = f + g > 0 ? f / (f + g) : 0.5;
    float w[2] = {(float)ratio, (float)(1 - ratio)};
    struct adapter *both[2] = {a->adapter, b->adapter};
    struct adapter *sum = adapter_concat(both, w, 2, &err);
    assert_non_null(sum);
    double na = sqrt(adapter_dot(a->adapter, a->adapter)),
           nb = sqrt(adapter_dot(b->adapter, b->adapter)),
           norm = sqrt(adapter_dot(c->adapter, c->adapter));
    assert_true(adapter_cosine(sum, c->adapter) > 1 - 1e-5);
    assert_true(fabs(norm / (ratio * na + (1 - ratio) * nb) - 1) < 1e-4);
    json_t *parents = json_object_get(c->adapter->lineage, "parents");
    assert_non_null(parents);
    char *text = json_canonical(parents);
    assert_non_null(strstr(text, a->adapter->hash));
    assert_non_null(strstr(text, b->adapter->hash));
    free(text);
    adapter_release(sum);
}

static void test_children(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    struct error err;
    struct simulation_options o = simulation_options_init("none");
    o.mutation_rate = 0;
    o.learn.train.r = 4; // enough rank for two parents of rank 2
    o.elites = 1;
    simulation_test_open(&w, o, true, 1);
    for (int g = 0; g < 3; g++) {
        generation_run(&w, ALL_TICKS, &log_text);
        struct parents p = parents_copy(w.simulation);
        for (int i = 1; i < POLICIES; i++)
            assert_true(p.v[i - 1].outcome.fitness >= p.v[i].outcome.fitness);
        assert_int_equal(simulation_begin_generation(w.simulation, NULL, &err), OK);
        if (g == 0) assert_true(p.v[0].outcome.fitness > 0);
        for (int i = 0; g == 0 && i < POLICIES; i++) {
            const struct policy_record *m = simulation_policy(w.simulation, i);
            assert_int_equal(m->elite, i < 1);
            if (i == 0) assert_string_equal(m->adapter->hash, p.v[0].adapter->hash);
            if (i == 0) assert_string_equal(m->name, p.v[0].name);
            if (i > 0) assert_child(&p, m);
        }
        simulation_end_generation(w.simulation);
        parents_release(&p);
    }
    simulation_test_close(&w);
    buf_release(&log_text);
}

static void test_no_breeding(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    struct simulation_options o = simulation_options_init("none");
    o.breed = false;
    simulation_test_open(&w, o, true, 1);
    for (int g = 0; g < 2; g++) generation_run(&w, ALL_TICKS, &log_text);
    for (int i = 0; i < POLICIES; i++) {
        const struct policy_record *m = simulation_policy(w.simulation, i);
        assert_string_equal(m->adapter->hash, fixture_adapters[m->name[3] - '0']->hash);
        assert_int_equal(m->name[1], '0');
    }
    simulation_test_close(&w);
    buf_release(&log_text);
}

/* Mutation is the only difference to children without mutation, for all children or for none. */
static void test_mutants(void **state) {
    (void)state;
    char *hashes[2][POLICIES];
    for (int k = 0; k < 2; k++) {
        struct simulation_test w;
        struct buf log_text = {0};
        struct error err;
        struct simulation_options o = simulation_options_init("none");
        o.mutation_rate = k;
        simulation_test_open(&w, o, true, 1);
        generation_run(&w, ALL_TICKS, &log_text);
        assert_int_equal(simulation_begin_generation(w.simulation, NULL, &err), OK);
        for (int i = 0; i < POLICIES; i++)
            hashes[k][i] = xstrdup(simulation_policy(w.simulation, i)->adapter->hash);
        simulation_test_close(&w);
        buf_release(&log_text);
    }
    for (int i = 0; i < POLICIES; i++) assert_strings(hashes[0][i], hashes[1][i], i == 0);
}

/* The same simulation twice, with and without the statistics of elites. */
static void test_carry_elite_stats(void **state) {
    (void)state;
    double fitness[2][2], first = 0;
    char names[2][32];
    for (int k = 0; k < 2; k++) {
        struct simulation_test w;
        struct buf log_text = {0};
        struct simulation_options o = simulation_options_init("none");
        o.carry_elite_stats = k;
        simulation_test_open(&w, o, true, 1);
        generation_run(&w, ALL_TICKS, &log_text);
        strcpy(names[k], simulation_policy(w.simulation, 0)->name);
        first = simulation_policy(w.simulation, 0)->outcome.fitness;
        generation_run(&w, ALL_TICKS, &log_text);
        for (int i = 0; i < POLICIES; i++) {
            const struct policy_record *m = simulation_policy(w.simulation, i);
            if (strcmp(m->name, names[k]) == 0) fitness[k][0] = m->outcome.fitness;
            if (strcmp(m->name, "g1m2") == 0) fitness[k][1] = m->outcome.fitness;
        }
        simulation_test_close(&w);
        buf_release(&log_text);
    }
    assert_string_equal(names[0], names[1]);
    assert_true(first != 0);
    assert_true(fabs(fitness[1][0] - fitness[0][0] - first) < 1e-9);
    assert_true(fitness[1][1] == fitness[0][1]);
}

/* state on disk */

static char *simulation_text(const struct simulation *l) {
    struct buf b = {0};
    policies_log(l, true, &b);
    return b.data;
}

/* Loading is refused with an error that names the file, and the simulation is unchanged. */
static void assert_load_refused(struct simulation_test *w, const char *dir, const json_t *state,
                                const char *what) {
    struct error err = {0};
    char *before = simulation_text(w->simulation);
    int rc = simulation_load(w->simulation, dir, state, &err);
    if (rc == OK) fail_msg("%s was taken", what);
    if (rc >= 0 || !strstr(err.text, "state.json': ")) fail_msg("%s: %d '%s'", what, rc, err.text);
    assert_strings(before, simulation_text(w->simulation), true);
}

/* Every member of an object in `state`: removed, and replaced by a value of every other type. */
static void damage_members(struct simulation_test *w, const char *dir, json_t *state, json_t *at) {
    json_t *copy = json_deep_copy(at), *v;
    const char *key;
    json_object_del(copy, "extra"); // is the caller's
    json_object_foreach (copy, key, v) {
        json_t *others[] = {json_null(),     json_object(),       json_array(),    json_true(),
                            json_real(-7.5), json_string("\x7f"), json_real(1e300)};
        json_object_del(at, key);
        assert_load_refused(w, dir, state, key);
        for (size_t i = 0; i < ARRAY_LEN(others); i++) {
            bool kind = json_typeof(others[i]) == json_typeof(v) ||
                        (json_is_number(others[i]) && json_is_real(v)) ||
                        (json_is_boolean(v) && json_is_true(others[i]));
            bool list = json_is_array(v) && strcmp(key, "parents") == 0 && json_is_array(others[i]);
            bool fits = json_is_string(v) && strcmp(key, "name") == 0 && json_is_string(others[i]);
            if ((kind && !json_is_string(v) && !json_is_object(v) && !json_is_array(v)) || list ||
                fits)
                continue;
            char *what = xasprintf("'%s' as its other %zu", key, i);
            json_object_set(at, key, others[i]);
            assert_load_refused(w, dir, state, what);
            free(what);
        }
        for (size_t i = 0; i < ARRAY_LEN(others); i++) json_decref(others[i]);
        json_object_set(at, key, v);
    }
    json_decref(copy);
}

static void damage_file(const char *path, int how) {
    struct error err;
    struct buf b = {0};
    if (file_read(path, 1 << 30, &b, &err) != OK) fail_msg("%s", err.text);
    if (how == 0) b.data[b.len - 5] ^= 1;
    if (how == 1) b.len -= 1;
    if (how == 2) buf_puts(&b, "x");
    if (how == 3) unlink(path);
    if (how < 3) assert_int_equal(file_write(path, b.data, b.len, &err), OK);
    buf_release(&b);
}

static void damage_files(struct simulation_test *w, const char *dir, const json_t *state) {
    struct error err;
    const struct policy_record *m = simulation_policy(w->simulation, 2);
    char *paths[] = {xasprintf("%s/critics-1.bin", dir),
                     xasprintf("%s/minds/%s/adapter_model.safetensors", dir, m->adapter->hash),
                     xasprintf("%s/minds/%s/adapter_config.json", dir, m->adapter->hash)};
    for (size_t i = 0; i < ARRAY_LEN(paths); i++)
        for (int how = i == 2 ? 3 : 0; how < 4; how++) {
            struct buf whole = {0};
            assert_int_equal(file_read(paths[i], 1 << 30, &whole, &err), OK);
            damage_file(paths[i], how);
            assert_load_refused(w, dir, state, paths[i]);
            assert_int_equal(file_write(paths[i], whole.data, whole.len, &err), OK);
            buf_release(&whole);
        }
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) free(paths[i]);
}

static void damage_hash(struct simulation_test *w, const char *dir, json_t *state, json_t *policy) {
    char *hash = xstrdup(json_get_string(policy, "hash"));
    char *longer = xasprintf("%s/.", hash), *zeros = xstrdup(hash);
    char *parent = xasprintf("../minds/%s", hash);
    memset(zeros, '0', strlen(zeros));
    const char *wrong[] = {
        zeros, longer, parent,
        json_get_string(json_array_get(json_object_get(state, "minds"), 1), "name")};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        json_object_set_new(policy, "hash", json_string(wrong[i]));
        assert_load_refused(w, dir, state, wrong[i]);
    }
    json_object_set_new(policy, "hash", json_string(hash));
    free(hash);
    free(longer);
    free(zeros);
    free(parent);
}

static void test_damaged_states(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    struct error err;
    char *dir = path_in_folder("damaged"), *path = path_join(dir, "state.json");
    assert_null(simulation_read_state(dir, &err));
    assert_int_equal(err.code, ERR_MISSING);
    simulation_test_open(&w, simulation_options_init("gradient"), true, 1);
    generation_run(&w, ALL_TICKS, &log_text);
    state_save(w.simulation, dir);
    json_t *v = simulation_read_state(dir, &err);
    assert_non_null(v);
    assert_int_equal(simulation_load(w.simulation, dir, v, &err), OK);
    damage_members(&w, dir, v, v);
    json_t *policies = json_object_get(v, "minds"), *policy = json_array_get(policies, 0);
    damage_members(&w, dir, v, policy);
    damage_members(&w, dir, v, json_object_get(policy, "outcome"));
    damage_members(&w, dir, v, json_object_get(policy, "health"));
    damage_hash(&w, dir, v, policy);
    damage_files(&w, dir, v);
    assert_int_equal(simulation_load(w.simulation, dir, v, &err), OK); // none of the refused states
                                                                       // had an effect
    json_t *parents = json_object_get(policy, "parents");
    for (int i = 0; i < 3; i++) json_array_append_new(parents, json_string("g0m0"));
    assert_load_refused(&w, dir, v, "three parents");
    json_array_clear(parents);
    json_array_append(policies, policy);
    assert_load_refused(&w, dir, v, "a mind more");
    json_array_remove(policies, 0);
    json_array_remove(policies, 0);
    assert_load_refused(&w, dir, v, "a mind less");
    assert_load_refused(&w, dir, policies, "a list");
    json_decref(v);
    assert_int_equal(file_write(path, "{\"minds\":", 9, &err), OK);
    assert_null(simulation_read_state(dir, &err));
    assert_int_equal(err.code, ERR_FORMAT);
    simulation_test_close(&w);
    buf_release(&log_text);
    free(path);
    free(dir);
}

/* Faults are injected between Shoal and the C library (--wrap in the Makefile). */
static long calls, fault_at; /* file system calls so far; the call that fails with a full disk */
static bool fault_kills;

static bool call_fails(void) {
    if (++calls != fault_at) return false;
    if (fault_kills) _exit(7);
    errno = ENOSPC;
    return true;
}

int __real_open(const char *path, int flags, ...);
size_t __real_fwrite(const void *p, size_t size, size_t n, FILE *f);
int __real_fflush(FILE *f);
int __real_fsync(int fd);
int __real_rename(const char *from, const char *to);
int __wrap_open(const char *path, int flags, ...);
size_t __wrap_fwrite(const void *p, size_t size, size_t n, FILE *f);
int __wrap_fflush(FILE *f);
int __wrap_fsync(int fd);
int __wrap_rename(const char *from, const char *to);

int __wrap_open(const char *path, int flags, ...) {
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return call_fails() ? -1 : __real_open(path, flags, mode);
}

size_t __wrap_fwrite(const void *p, size_t size, size_t n, FILE *f) {
    if (f == stderr || f == stdout || !call_fails()) return __real_fwrite(p, size, n, f);
    size_t half = __real_fwrite(p, size, n / 2, f);
    errno = ENOSPC;
    return half;
}

int __wrap_fflush(FILE *f) {
    return f == stderr || f == stdout || !call_fails() ? __real_fflush(f) : EOF;
}

int __wrap_fsync(int fd) {
    return call_fails() ? -1 : __real_fsync(fd);
}

int __wrap_rename(const char *from, const char *to) {
    return call_fails() ? -1 : __real_rename(from, to);
}

/* Saves with the n-th call failing, or killing the process; returns whether it succeeded. */
static bool save_with_fault(const struct simulation *l, const char *dir, long n, bool kill) {
    struct error err = {0};
    json_t *extra = json_pack("{s:s}", "mine", "too");
    int status = 0;
    pid_t pid = kill ? fork() : 0;
    fault_kills = kill;
    calls = 0;
    if (pid == 0) {
        fault_at = n;
        int rc = simulation_save(l, dir, extra, &err);
        fault_at = 0;
        if (kill) _exit(rc == OK ? 0 : 1);
        if (rc != OK && (rc != ERR_IO || !err.text[0])) fail_msg("call %ld: %d", n, rc);
        status = rc != OK;
    } else {
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) != 1);
    }
    json_decref(extra);
    return status == 0;
}

/* For any failure, the folder has the complete previous or current generation, and the next save
 * repairs it. */
static void test_failed_saves(void **state) {
    (void)state;
    struct simulation_test w;
    struct buf log_text = {0};
    char *dir = path_in_folder("full"), *states[2];
    struct simulation *simulations[2];
    simulation_test_open(&w, simulation_options_init("gradient"), true, 1);
    for (int g = 0; g < 2; g++) {
        generation_run(&w, ALL_TICKS, &log_text);
        state_save(w.simulation, dir);
        states[g] = simulation_text(simulations[g] = w.simulation);
        simulation_start(&w);
        state_load(w.simulation, dir);
    }
    for (int kill = 0; kill < 2; kill++) {
        int kept = 0;
        bool complete = false;
        for (long n = 1; !complete; n++) {
            state_save(simulations[0], dir);
            complete = save_with_fault(simulations[1], dir, n, kill);
            state_load(w.simulation, dir);
            char *now = simulation_text(w.simulation);
            bool old = strcmp(now, states[0]) == 0;
            if ((!old && strcmp(now, states[1]) != 0) || (old && complete))
                fail_msg("call %ld leaves %s", n, now);
            kept += old;
            state_save(simulations[1], dir);
            state_load(w.simulation, dir);
            assert_strings(now, xstrdup(old ? states[0] : states[1]), true);
            assert_strings(simulation_text(w.simulation), xstrdup(states[1]), true);
        }
        assert_true(kept > 20);
    }
    for (int g = 0; g < 2; g++) {
        simulation_free(simulations[g]);
        free(states[g]);
    }
    simulation_test_close(&w);
    buf_release(&log_text);
    free(dir);
}

/* options */

/* Writes the curve of a run: a point for each pair of decisions and deliveries. */
static void curve_write(const char *root, const char *run, const double (*points)[2], int n) {
    char *dir = path_join(root, run), *path = path_join(dir, "curve.jsonl");
    struct buf b = {0};
    struct error err;
    buf_puts(&b, "{\"policy\":\"rule\",\"held_out\":{\"delivered\":{\"value\":10}}}\n");
    for (int i = 0; i < n; i++)
        buf_printf(&b,
                   "{\"generation\":%d,\"decisions\":%g,"
                   "\"held_out\":{\"delivered\":{\"value\":%g}}}\n",
                   i, points[i][0], points[i][1]);
    assert_int_equal(dir_make(dir, &err), OK);
    assert_int_equal(file_write(path, b.data, b.len, &err), OK);
    buf_release(&b);
    free(path);
    free(dir);
}

/* Two groups of two runs of different lengths, compared at their ends and after equal decisions. */
static void test_comparison(void **state) {
    static const double slow[2][3][2] = {{{0, 0}, {100, 5}, {300, 9}},
                                         {{0, 1}, {200, 3}, {400, 5}}},
                        fast[2][3][2] = {{{0, 0}, {50, 4}, {100, 6}}, {{0, 1}, {50, 8}, {150, 9}}};
    static const struct {
        double at, delivered[2], difference;
    } cases[] = {{0, {7, 7.5}, -0.5},          // 9, 5; 6, 9
                 {50, {2, 6}, -4},             // 2.5, 1.5; 4, 8
                 {100, {3.5, 7.25}, -3.75},    // 5, 2; 6, 8.5
                 {75, {2.75, 6.625}, -3.875}}; // 3.75, 1.75; 5, 8.25
    char *root = path_in_folder("compared"), *names[] = {"slow", "fast"};
    struct error err;
    (void)state;
    for (int i = 0; i < 2; i++) {
        curve_write(root, i ? "slow-s2" : "slow-s1", slow[i], 3);
        curve_write(root, i ? "fast-s2" : "fast-s1", fast[i], 3);
    }
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct simulation_comparison *c = simulation_compare(root, names, 2, cases[i].at, &err);
        assert_non_null(c);
        for (int k = 0; k < 2; k++)
            assert_float_equal(c->groups[k].delivered.value, cases[i].delivered[k], 1e-12);
        assert_int_equal(c->groups[1].pairs, 2);
        assert_float_equal(c->groups[1].difference.value, cases[i].difference, 1e-12);
        assert_float_equal(c->groups[1].decisions, 100, 0);
        assert_float_equal(c->groups[1].decisions_to_80_percent, 50, 0);
        simulation_comparison_free(c);
    }
    assert_null(simulation_compare(root, names, 2, 101, &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_string_equal(err.text, "'fast-s1' ends after 100 decisions");
    free(root);
}

static void test_options(void **state) {
    (void)state;
    static const struct {
        size_t at;
        const char *value, *message;
    } wrong[] = {
        {offsetof(struct simulation_options, decode), "loud", "no decoding 'loud'"},
        {offsetof(struct simulation_options, decode), "text", "--learn none"},
        {offsetof(struct simulation_options, teacher), "nobody", "no policy 'nobody'"},
        {offsetof(struct simulation_options, crossover), "x", "'x'"},
        {offsetof(struct simulation_options, mutation), "y", "'y'"},
        {offsetof(struct simulation_options, learn.learn), "rote", "no way to learn 'rote'"},
        {offsetof(struct simulation_options, learn.train.optim), "lion", "'lion'"},
    };
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        struct simulation_options o = simulation_options_init("gradient");
        assert_int_equal(simulation_options_check(&o, &err), OK);
        char **at = (char **)(void *)((uint8_t *)&o + wrong[i].at);
        free(*at);
        *at = xstrdup(wrong[i].value);
        assert_int_equal(simulation_options_check(&o, &err), ERR_USAGE);
        if (!strstr(err.text, wrong[i].message)) fail_msg("'%s'", err.text);
        options_release(learner_option_rows, &o.learn);
        options_release(simulation_option_rows, &o);
    }
    struct simulation_options o = simulation_options_init("clone");
    o.learn.buffer_size = 2 * o.learn.batch_size - 1;
    assert_int_equal(simulation_options_check(&o, &err), ERR_USAGE);
    o.learn.buffer_size++;
    assert_int_equal(simulation_options_check(&o, &err), OK);
    o.curriculum = 3;
    assert_int_equal(simulation_options_check(&o, &err), ERR_USAGE);
    options_release(learner_option_rows, &o.learn);
    options_release(simulation_option_rows, &o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_policy_equals_the_model),
        cmocka_unit_test(test_sampling_follows_the_generator),
        cmocka_unit_test(test_batch_equals_single_decisions),
        cmocka_unit_test(test_cached_decisions_have_equal_bits),
        cmocka_unit_test(test_engines_of_threads_have_equal_bits),
        cmocka_unit_test(test_fast_class_policy),
        cmocka_unit_test(test_actions_with_the_same_tokens),
        cmocka_unit_test(test_long_prompts),
        cmocka_unit_test(test_context_and_sequences),
        cmocka_unit_test(test_text_answers_are_parsed),
        cmocka_unit_test(test_returns),
        cmocka_unit_test(test_exploration_bonus),
        cmocka_unit_test(test_replay_buffer_drops_the_oldest),
        cmocka_unit_test(test_replay_share),
        cmocka_unit_test(test_shared_experience),
        cmocka_unit_test(test_one_update_moves_the_policy),
        cmocka_unit_test(test_behaviour_cloning),
        cmocka_unit_test(test_gradient_equals_the_loss_gradient),
        cmocka_unit_test(test_gradient_of_words),
        cmocka_unit_test(test_clipped_side_has_no_gradient),
        cmocka_unit_test(test_only_nonfinite_policies_are_rolled_back),
        cmocka_unit_test(test_nonfinite_decision),
        cmocka_unit_test(test_collapse_is_reported),
        cmocka_unit_test(test_rate_zero_is_frozen),
        cmocka_unit_test(test_words_in_a_world),
        cmocka_unit_test(test_language),
        cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_tokenizers_in_a_world),
        cmocka_unit_test(test_interruptions_change_nothing),
        cmocka_unit_test(test_defaults_learn),
        cmocka_unit_test(test_curriculum),
        cmocka_unit_test(test_without_curriculum),
        cmocka_unit_test(test_rate_that_makes_all_nonfinite),
        cmocka_unit_test(test_nonfinite_policy_does_not_change_others),
        cmocka_unit_test(test_health_of_a_short_generation),
        cmocka_unit_test(test_children),
        cmocka_unit_test(test_no_breeding),
        cmocka_unit_test(test_mutants),
        cmocka_unit_test(test_carry_elite_stats),
        cmocka_unit_test(test_damaged_states),
        cmocka_unit_test(test_failed_saves),
        cmocka_unit_test(test_comparison),
        cmocka_unit_test(test_options),
    };
    log_quiet = true;
    return cmocka_run_group_tests(tests, suite_setup, suite_teardown);
}
