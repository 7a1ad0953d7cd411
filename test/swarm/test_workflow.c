/*
 * test_workflow: workflows of debates with a scripted client, without weights.
 *
 * The complete prompts of the built-in protocols are in test/cases/workflow-NAME.txt
 * (`build/test_workflow --write` writes them again: review the difference). The legacy rules are
 * implemented a second time here, from their description. The reasons for which a workflow file is
 * refused are in test/cases/workflow-refused.txt, the votes that the legacy rules find in
 * utterances in test/cases/workflow-legacy-votes.txt.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "grade/grade.h"
#include "swarm/swarm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

/* a team with scripted replies */

enum { CALLS_MAX = 4096, ITEMS_MAX = 64 };

struct scripted_reply { /* an agent's reply */
    const char *text, *failed;
    int choice; /* a choice of the item, or one of a judge's candidates; with probability 0.7 */
    int n_generated;
    bool truncated;
};
/* An agent's nth reply on an item. */
typedef struct scripted_reply reply_fn(const struct llm_call *c, int agent, int item, int nth);
struct recorded_call { /* a recorded call */
    int agent, item, batch;
    char *messages; /* all messages */
    uint64_t seed;
    float temperature, top_p;
    int32_t max_tokens;
    int n_candidates;
};
struct script {
    const struct agent *team;
    const struct task_item *items;
    const struct workflow *w;
    reply_fn *respond;
    int nth[TEAM_MAX][ITEMS_MAX];
    struct recorded_call v[CALLS_MAX];
    int n, batches;
    struct buf log; /* for people */
};
static struct script script;

static const char *const reply_names[] = {"text", "answer", "judge", "legacy"};

static void call_log(const struct llm_call *c, int agent, const struct scripted_reply *said,
                     struct buf *out) {
    const char *role = workflow_role(script.w, agent);
    buf_printf(out, "[%s%s%s] %s\n", c->agent->name, *role ? " " : "", role, reply_names[c->reply]);
    for (int i = 0; i < c->n_messages; i++)
        buf_printf(out, "%s: %s\n", c->messages[i].role, c->messages[i].content);
    for (int i = 0; c->reply == REPLY_JUDGE && i < c->n_candidates; i++)
        buf_printf(out, "%s%s", i ? " | " : "may answer: ", c->candidates[i]);
    if (c->reply == REPLY_JUDGE) buf_printf(out, "\n");
    buf_printf(out, ">> %s%s", said->failed ? "fails: " : "",
               said->failed ? said->failed : said->text);
    if (!said->failed && said->choice >= 0 &&
        (c->reply == REPLY_JUDGE || (c->reply == REPLY_ANSWER && c->item->n_choices)))
        buf_printf(out, "%s= %s", *said->text ? " " : "", c->candidates[said->choice]);
    buf_printf(out, "\n\n");
}

static void call_record(const struct llm_call *c, int agent, int item) {
    struct buf b = {0};
    assert_true(script.n < CALLS_MAX);
    for (int i = 0; i < c->n_messages; i++)
        buf_printf(&b, "%s: %s\n", c->messages[i].role, c->messages[i].content);
    buf_printf(&b, "%s", ""); // an empty message is an empty text, not NULL
    script.v[script.n++] = (struct recorded_call){.agent = agent,
                                                  .item = item,
                                                  .batch = script.batches,
                                                  .messages = b.data,
                                                  .seed = c->seed,
                                                  .temperature = c->temperature,
                                                  .top_p = c->top_p,
                                                  .max_tokens = c->max_tokens,
                                                  .n_candidates = c->n_candidates};
}

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    (void)ctx;
    (void)e;
    buf_printf(&script.log, "-- %d --\n", ++script.batches);
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        int agent = (int)(c->agent - script.team), item = (int)(c->item - script.items);
        struct scripted_reply said = script.respond(c, agent, item, script.nth[agent][item]++);
        if (!said.text) said.text = "";
        call_log(c, agent, &said, &script.log);
        call_record(c, agent, item);
        c->failed = said.failed;
        c->truncated = said.truncated;
        c->n_generated = said.n_generated;
        c->text = said.failed ? NULL : xstrdup(said.text);
        c->answer.choice = said.choice;
        c->answer.confidence = 0.7f;
        if (said.choice >= 0 && said.choice < EVAL_MAX_CHOICES) c->answer.prob[said.choice] = 0.7f;
    }
    return OK;
}

/* The embedding of a text is its length. */
static int script_embed(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                        int64_t *n_tokens, struct error *e) {
    (void)ctx;
    (void)e;
    *d = 1;
    *n_tokens = n;
    *out = xcalloc((size_t)n, sizeof **out);
    for (int i = 0; i < n; i++) (*out)[i] = (float)strlen(texts[i]);
    return OK;
}

static void script_reset(void) {
    for (int i = 0; i < script.n; i++) free(script.v[i].messages);
    buf_release(&script.log);
    memset(&script, 0, sizeof script);
}

static const struct agent four_agents[] = {
    {.name = "ada"}, {.name = "ben"}, {.name = "花"}, {.name = "dai"}};

/* Runs the workflow with the script; the caller releases the transcripts. */
static void run_team(const struct workflow *w, const struct agent *team, int n_agents,
                     const struct task_item *items, int n_items, struct workflow_options o,
                     reply_fn *respond, struct transcript *talks) {
    struct llm_client a = {NULL, script_ask, script_embed};
    script_reset();
    script.team = team;
    script.items = items;
    script.respond = respond;
    script.w = w;
    memset(talks, 0, (size_t)n_items * sizeof *talks);
    if (workflow_run(w, &a, team, n_agents, items, n_items, &o, talks, NULL, &err) != OK)
        fail_msg("%s", err.text);
}

static const struct workflow_options default_options = {.temperature = -1, .seed = 3};

static struct workflow *workflow_of_yaml(const char *yaml) {
    struct workflow *w = workflow_parse(yaml, strlen(yaml), "w.yaml", &err);
    if (!w) fail_msg("%s", err.text);
    return w;
}

/* One item, with the first `n` of the four agents. */
static struct transcript run_one(const char *yaml, int n, const struct task_item *it,
                                 struct workflow_options o, reply_fn *respond) {
    struct transcript out;
    struct workflow *w = workflow_of_yaml(yaml);
    run_team(w, four_agents, n, it, 1, o, respond, &out);
    workflow_free(w);
    return out;
}

#define TEXT(s) ((char *)(uintptr_t)(s))
static const struct task_item abc = {.question = TEXT("which?"),
                                     .choices = {TEXT("a"), TEXT("b"), TEXT("c")},
                                     .n_choices = 3,
                                     .lang = "en"},
                              open_item = {.question = TEXT("what?"), .lang = "en"};

static const char *decision(const struct transcript *o) {
    return o->answer < 0 ? "nothing" : o->candidates[o->answer];
}

/* prompts of the built-in protocols */

static const struct task_item questions[] = {
    {.question = TEXT("Which is larger, 0.9 or 0.11?"),
     .choices = {TEXT("0.9"), TEXT("0.11")},
     .n_choices = 2,
     .lang = "en"},
    {.question = TEXT("0.9と0.11では、どちらが大きいですか。"),
     .choices = {TEXT("0.9"), TEXT("0.11")},
     .n_choices = 2,
     .lang = "ja"},
    {.question = TEXT("0.9和0.11，哪个更大？"),
     .choices = {TEXT("0.9"), TEXT("0.11")},
     .n_choices = 2,
     .lang = "zh"},
    {.question = TEXT("How many legs have two spiders?"), .lang = "en"}};

/* 花 replies briefly and changes first; ben gives no reasons. */
static struct scripted_reply reply_choices(const struct llm_call *c, int agent, int item, int nth) {
    static const char *const why[3][3] = {
        {"Tenths count first:\nnine are more than one.", "", "Eleven is more than nine."},
        {"小数第一位を比べます。\n9は1より大きいです。", "", "11は9より大きいです。"},
        {"先比较十分位。\n9大于1。", "", "11比9大。"}};
    static const char *const open_points[] = {"They differ on what the digits mean.",
                                              "桁の意味が争点です。", "分歧在于数位的含义。"};
    if (c->reply == REPLY_TEXT) return (struct scripted_reply){.text = open_points[item]};
    if (c->reply == REPLY_JUDGE) return (struct scripted_reply){.text = why[item][0], .choice = 0};
    return (struct scripted_reply){.text = why[item][agent % 3],
                                   .choice = agent == 2 ? nth < 1 : agent == 1};
}

/* Without choices: ada answers, ben's reply is empty, then has no answer, 花 fails once. */
static struct scripted_reply reply_open(const struct llm_call *c, int agent, int item, int nth) {
    (void)item;
    if (c->reply == REPLY_TEXT) return (struct scripted_reply){.text = "How many legs has one?"};
    if (c->reply == REPLY_JUDGE) return (struct scripted_reply){.text = "Eight each.", .choice = 0};
    if (agent == 1) return (struct scripted_reply){.text = nth ? "Spiders are lovely." : ""};
    if (agent == 2 && nth == 1) return (struct scripted_reply){.failed = "the call has no room"};
    return (struct scripted_reply){.text = agent ? "Answer: 12." : "Eight and eight.\nanswer: 16"};
}

static struct scripted_reply reply_legacy(const struct llm_call *c, int agent, int item, int nth) {
    static const char *const lines[3][3] = {
        {"{\"answer\": \"16\", \"confidence\": 0.8}", "Vote: 16", "結論: 16"},
        {"Spiders have six legs.\n結論: 12", "結論: 12", "最終: 12"},
        {"発話: 八本です。\n要約: 八本\n自信: 0.9", "Answer: 16", "{\"vote\": 16}"}};
    (void)c;
    (void)item;
    return (struct scripted_reply){.text = lines[agent][nth]};
}

/* No message begins or ends with white space or has two consecutive empty lines. */
static void check_white_space(const struct script *s) {
    for (int i = 0; i < s->n; i++) {
        const char *w = s->v[i].messages;
        if (strstr(w, "\n\n\n") || strstr(w, ": \n") || strstr(w, " \n") ||
            strstr(w, "\n\nuser:") || strstr(w, "\n\nassistant:") ||
            (strlen(w) > 1 && strcmp(w + strlen(w) - 2, "\n\n") == 0))
            fail_msg("stray white space in the prompt of agent %d:\n%s", s->v[i].agent, w);
    }
}

static void protocol_log(const char *name, const char *head, const struct task_item *it,
                         int n_agents, reply_fn *respond, struct buf *out) {
    static const char *const endings[] = {"rounds", "agreed", "budget", "nobody"};
    static const char *const systems[] = {"You are careful.", "あなたは慎重です。", "你很谨慎。"};
    struct agent team[4];
    struct transcript o;
    struct workflow *w = workflow_open(name, &err);
    if (!w) fail_msg("%s", err.text);
    memcpy(team, four_agents, sizeof team);
    for (int i = 0; i < n_agents; i += 2)
        team[i].system = systems[respond == reply_choices ? it - questions : 0];
    script_reset();
    struct llm_client a = {NULL, script_ask, script_embed};
    script = (struct script){.team = team,
                             .items = respond == reply_choices ? questions : it,
                             .respond = respond,
                             .w = w};
    o = (struct transcript){0};
    if (workflow_run(w, &a, team, n_agents, it, 1, &default_options, &o, NULL, &err) != OK)
        fail_msg("%s", err.text);
    check_white_space(&script);
    buf_printf(out, "==== %s ====\n%s=> %s (%s, rounds: %d", head, script.log.data, decision(&o),
               endings[o.stop_reason], o.rounds);
    for (int i = 0; i < o.n_candidates; i++)
        buf_printf(out, "; %s: %.2f", o.candidates[i], o.scores[i]);
    buf_printf(out, ")\n\n");
    transcript_release(&o);
    workflow_free(w);
}

static void protocol_text(const char *name, struct buf *out) {
    int n = strcmp(name, "mad") == 0 ? 4 : 3;
    buf_printf(
        out,
        "# The prompts of '%s', call by call; >> is the agent's reply, -- n -- a step of the "
        "engine.\n# Written by build/test_workflow --write.\n\n",
        name);
    if (strcmp(name, "legacy") == 0) {
        protocol_log(name, "en", &questions[3], n, reply_legacy, out);
        return;
    }
    for (int i = 0; i < 3; i++)
        protocol_log(name, questions[i].lang, &questions[i], n, reply_choices, out);
    protocol_log(name, "en, without choices", &questions[3], n, reply_open, out);
}

static char *golden_path(const char *name) {
    return xasprintf("test/cases/workflow-%s.txt", name);
}

/* Compares two texts; the message contains the first line that differs. */
static void check_text(const char *path, const char *got, const char *want) {
    int line = 1;
    size_t i = 0;
    for (; got[i] && got[i] == want[i]; i++) line += got[i] == '\n';
    if (got[i] == want[i]) return;
    while (i > 0 && got[i - 1] != '\n') i--;
    fail_msg("'%s' line %d: got\n%.200s\nnot\n%.200s", path, line, got + i, want + i);
}

static void test_protocols(void **state) {
    (void)state;
    const char *name;
    for (int i = 0; (name = workflow_builtin(i, NULL)); i++) {
        struct buf got = {0}, want = {0};
        char *path = golden_path(name);
        if (file_read(path, 1 << 20, &want, &err) != OK) fail_msg("%s", err.text);
        protocol_text(name, &got);
        check_text(path, got.data, want.data);
        buf_release(&got);
        buf_release(&want);
        free(path);
    }
    script_reset();
}

static int protocols_write(void) {
    const char *name;
    for (int i = 0; (name = workflow_builtin(i, NULL)); i++) {
        struct buf b = {0};
        char *path = golden_path(name);
        protocol_text(name, &b);
        FILE *f = fopen(path, "w");
        if (!f || fwrite(b.data, 1, b.len, f) != b.len || fclose(f) != 0) return 1;
        buf_release(&b);
        free(path);
    }
    script_reset();
    return 0;
}

/* the legacy rules, from their description */

/* The next line of a table that is neither empty nor a comment. */
static char *table_line(char **rest, int *n_line) {
    for (char *line; (line = strsep(rest, "\n")) != NULL;) {
        ++*n_line;
        if (*line && *line != '#') return line;
    }
    return NULL;
}

static void unescape(char *s) {
    char *out = s;
    for (; *s; s++)
        if (s[0] == '\\' && s[1])
            *out++ = *++s == 'n' ? '\n' : *s == 't' ? '\t' : *s == 'r' ? '\r' : *s;
        else
            *out++ = *s;
    *out = 0;
}

static void test_legacy_votes(void **state) {
    (void)state;
    struct buf file = {0};
    int n_line = 0, n_cases = 0;
    if (file_read("test/cases/workflow-legacy-votes.txt", 1 << 20, &file, &err) != OK)
        fail_msg("%s", err.text);
    for (char *rest = file.data, *text; (text = table_line(&rest, &n_line)); n_cases++) {
        float sure = -1;
        char *want = strstr(text, " | "), *want_sure = want ? strstr(want + 3, " | ") : NULL;
        if (!want_sure) fail_msg("line %d: no two bars", n_line);
        *want = *want_sure = 0;
        unescape(text);
        char *got = legacy_vote_parse(text, &sure);
        if (strcmp(got, want + 3) != 0) fail_msg("line %d: '%s', not '%s'", n_line, got, want + 3);
        if (fabs((double)sure - strtod(want_sure + 3, NULL)) > 1e-6)
            fail_msg("line %d: %g, not %s", n_line, (double)sure, want_sure + 3);
        free(got);
    }
    buf_release(&file);
    assert_true(n_cases > 30);
}

/* Draws from few answers and few confidences, so that ties are common. */
static char legacy_texts[ITEMS_MAX][3][3][64];

static struct scripted_reply reply_sampled_legacy(const struct llm_call *c, int agent, int item,
                                                  int nth) {
    (void)c;
    return (struct scripted_reply){.text = legacy_texts[item][agent][nth]};
}

static void legacy_texts_sample(int n_items) {
    static const char *const names[] = {"海", "山", "空"};
    struct rng r = rng_make(4, RNG_TEST, 0, 0);
    for (int i = 0; i < n_items * 9; i++) {
        char *out = legacy_texts[i / 9][i / 3 % 3][i % 3];
        const char *name = names[rng_below(&r, 3)];
        if (i / 9 % 2) // every other item is replied to in lines, with equal weights
            snprintf(out, 64, "結論: %s です", name);
        else
            snprintf(out, 64, "{\"answer\": \"%s\", \"confidence\": 0.%d}", name,
                     rng_below(&r, 4) ? 50 : 75);
    }
}

/* In turn: only the topic if there is no utterance yet, else all utterances so far. */
static void legacy_check_words(const struct recorded_call *h, int n) {
    struct buf said = {0}, want = {0};
    int at = 0;
    for (int r = 0; r < 3; r++)
        for (int a = 0; a < 3; a++, at++) {
            want.len = 0;
            buf_printf(&want, "user: %s%s\n", at ? "これまでの議論:\n" : "what?",
                       at ? said.data : "");
            const char *user = strstr(h[at * n].messages, "user: ");
            assert_int_equal(h[at * n].agent, a);
            assert_string_equal(user, want.data);
            assert_int_equal(strncmp(h[at * n].messages, "system: # Debate protocol\n", 26), 0);
            assert_true(h[at * n].temperature == 0.7f && h[at * n].top_p == 0.9f &&
                        h[at * n].max_tokens == 256);
            buf_printf(&said, "%s[A%d][R%d] %s", at ? "\n" : "", a, r,
                       legacy_texts[h[at * n].item][a][r]);
        }
    buf_release(&said);
    buf_release(&want);
}

/* The largest sum over all rounds; equal sums: the answer that came first. */
static const char *legacy_winner(int item, bool *tied) {
    static char names[9][64];
    double sums[9] = {0};
    int n = 0, best = 0;
    for (int at = 0; at < 9; at++) {
        float sure;
        int k = 0;
        char *name = legacy_vote_parse(legacy_texts[item][at % 3][at / 3], &sure);
        snprintf(names[n], sizeof names[n], "%s", name);
        while (strcmp(names[k], name) != 0) k++;
        sums[k] += (double)sure;
        n += k == n;
        free(name);
    }
    *tied = false;
    for (int k = 1; k < n; k++)
        if (sums[k] > sums[best]) best = k;
    for (int k = 0; k < n; k++) *tied |= k != best && sums[k] == sums[best];
    return names[best];
}

static void test_legacy_rules_naive(void **state) {
    (void)state;
    enum { N = 60 };
    struct task_item items[N];
    struct transcript o[N];
    int ties = 0;
    struct workflow *w = workflow_open("legacy", &err);
    assert_non_null(w);
    legacy_texts_sample(N);
    for (int i = 0; i < N; i++) items[i] = open_item;
    run_team(w, four_agents, 3, items, N, default_options, reply_sampled_legacy, o);
    assert_int_equal(script.n, 9 * N);
    assert_int_equal(script.batches, 9);
    for (int i = 0; i < N; i++) {
        bool tied;
        legacy_check_words(&script.v[i], N);
        assert_string_equal(decision(&o[i]), legacy_winner(i, &tied));
        ties += tied;
        transcript_release(&o[i]);
    }
    assert_true(ties > 5);
    workflow_free(w);
}

/* votes */

#define ASK "nodes: {q: {reply: answer, messages: [{user: \"{{ question }}\"}], temperature: 0}}\n"
#define LOOP "edges: [{from: q, to: q, when: round < rounds}]\n"

static struct scripted_reply reply_own_number(const struct llm_call *c, int agent, int item,
                                              int nth) {
    (void)c;
    (void)item;
    (void)nth;
    return (struct scripted_reply){.choice = 2 - agent % 3};
}

/* Equal counts and equal probabilities: the first choice, whichever agent gave it; a quorum has no
 * result. */
static void test_tie(void **state) {
    (void)state;
    for (const struct vote *v = vote_table; v->name; v++) {
        struct workflow_options o = default_options;
        o.vote = v;
        struct transcript out = run_one("name: x\n" ASK, 3, &abc, o, reply_own_number);
        assert_string_equal(decision(&out), v->quorum ? "nothing" : "a");
        assert_true(out.scores[0] == out.scores[1] && out.scores[1] == out.scores[2]);
        transcript_release(&out);
    }
}

static struct scripted_reply reply_variants(const struct llm_call *c, int agent, int item,
                                            int nth) {
    (void)c;
    (void)item;
    (void)nth;
    static const char *const texts[] = {"so\nanswer: 1/2", "answer: 0.5", "answer: ０．５ ",
                                        "answer: 2"};
    return (struct scripted_reply){.text = texts[agent]};
}

/* A grader decides which free answers are equal; without one, answers are equal that differ only in
 * case, character width and white space. */
static void test_equal_free_answers(void **state) {
    (void)state;
    struct workflow_options o = default_options;
    struct transcript by_text = run_one("name: x\n" ASK, 4, &open_item, o, reply_variants);
    assert_int_equal(by_text.n_candidates, 3);
    assert_string_equal(decision(&by_text), "0.5");
    o.grader = grader_find("math", &err);
    struct transcript by_math = run_one("name: x\n" ASK, 4, &open_item, o, reply_variants);
    assert_int_equal(by_math.n_candidates, 2);
    assert_int_equal(by_math.v[0].answer, by_math.v[2].answer);
    assert_true(by_math.scores[by_math.answer] == 3);
    transcript_release(&by_text);
    transcript_release(&by_math);
}

static struct scripted_reply reply_failing(const struct llm_call *c, int agent, int item, int nth) {
    (void)c;
    (void)nth;
    return (struct scripted_reply){.failed = item || agent == 1 ? "no room" : NULL,
                                   .choice = agent};
}

/* An agent that always fails abstains and is not shown to others; a team of failures has no
 * result. */
static void test_failures(void **state) {
    (void)state;
    static const char yaml[] = "name: x\nnodes: {q: {reply: answer, messages: [{user: \"{{ others "
                               "| length }} {{ transcript | length }} "
                               "{{ 'own' if own }}\"}]}}\n" LOOP;
    struct task_item items[2] = {abc, abc};
    struct transcript o[2];
    struct workflow *w = workflow_of_yaml(yaml);
    run_team(w, four_agents, 3, items, 2, default_options, reply_failing, o);
    static const char *const second[] = {"user: 1 2 own\n", "user: 2 2 \n", "user: 1 2 own\n"};
    for (int a = 0; a < 3; a++) {
        assert_string_equal(script.v[a].messages, "user: 0 0 \n");
        assert_string_equal(script.v[6 + a].messages, second[a]);
        assert_string_equal(script.v[9 + a].messages, "user: 0 0 \n");
    }
    assert_string_equal(decision(&o[0]), "a");
    assert_true(o[0].scores[0] == 1 && o[0].scores[1] == 0 && o[0].scores[2] == 1);
    assert_int_equal(o[0].stop_reason, WORKFLOW_STOP_ROUNDS);
    assert_string_equal(o[0].v[1].failed, "no room");
    assert_int_equal(o[0].v[1].answer, -1);
    assert_string_equal(decision(&o[1]), "nothing");
    assert_int_equal(o[1].stop_reason, WORKFLOW_STOP_NO_ANSWER);
    assert_int_equal(o[1].rounds, 2);
    for (int i = 0; i < 2; i++) transcript_release(&o[i]);
    workflow_free(w);
}

static struct scripted_reply reply_free(const struct llm_call *c, int agent, int item, int nth) {
    static const char *const lines[] = {"answer: 12",
                                        "I like it.",
                                        "ANSWER:\t12. ",
                                        "answer: \n",
                                        "answer: 9\nno, answer: 12\nbye",
                                        "答えは answer: 十二",
                                        ""};
    (void)c;
    (void)item;
    return (struct scripted_reply){.text = lines[(agent + nth) % 7]};
}

/* A free answer counts if there is an answer line: the last one, trimmed. */
static void test_invalid_free_answers(void **state) {
    (void)state;
    struct agent team[7];
    struct transcript o;
    struct workflow *w = workflow_of_yaml("name: x\n" ASK);
    for (int i = 0; i < 7; i++) team[i] = four_agents[i % 4];
    run_team(w, team, 7, &open_item, 1, default_options, reply_free, &o);
    assert_int_equal(o.n_candidates, 2);
    assert_string_equal(o.candidates[0], "12");
    assert_string_equal(o.candidates[1], "十二");
    assert_string_equal(decision(&o), "12");
    assert_true(o.scores[0] == 3 && o.scores[1] == 1);
    static const int answers[] = {0, -1, 0, -1, 0, 1, -1};
    for (int i = 0; i < 7; i++) assert_int_equal(o.v[i].answer, answers[i]);
    transcript_release(&o);
    workflow_free(w);
}

static struct scripted_reply reply_many(const struct llm_call *c, int agent, int item, int nth) {
    static char text[32];
    (void)c;
    (void)item;
    int number = agent == 16 ? 48 : agent + 16 * nth; // two agents answer 48 in the end
    snprintf(text, sizeof text, "answer: %d", number);
    return (struct scripted_reply){.text = text, .truncated = agent % 5 == 0};
}

/* Votes and judges have room for one different answer per utterance. */
static void test_many_answers(void **state) {
    (void)state;
    struct agent team[TEAM_MAX];
    struct transcript o;
    int truncated = 0;
    struct workflow *w = workflow_of_yaml("name: x\nrounds: 4\n" ASK LOOP);
    for (int i = 0; i < TEAM_MAX; i++) team[i] = four_agents[i % 4];
    for (const struct vote *v = vote_table; v->name; v++) {
        struct workflow_options options = default_options;
        options.vote = v;
        run_team(w, team, TEAM_MAX, &open_item, 1, options, reply_many, &o);
        assert_int_equal(o.n, 4 * TEAM_MAX);
        assert_int_equal(o.n_candidates, 4 * 16);
        assert_true(o.n_candidates > EVAL_MAX_CHOICES);
        assert_string_equal(decision(&o), v->quorum ? "nothing" : "48");
        for (int i = 0; i < o.n; i++) {
            const struct utterance *u = &o.v[i];
            assert_int_equal(atoi(o.candidates[u->answer]), atoi(u->text + strlen("answer: ")));
        }
        if (v->quorum) break;
        transcript_release(&o);
    }
    for (int i = 0; i < TEAM_MAX; i++) truncated += o.v[i].truncated;
    assert_int_equal(truncated, 4);
    transcript_release(&o);
    struct llm_client a = {NULL, script_ask, script_embed};
    struct debate d;
    struct debate_options options = {
        .workflow = w, .rounds = 1, .vote = vote_find("majority"), .temperature = -1};
    memset(script.nth, 0, sizeof script.nth);
    assert_int_equal(debate_run(&a, team, TEAM_MAX, &open_item, 1, &options, &d, NULL, &err), OK);
    assert_int_equal(d.truncated, 4);
    debate_release(&d);
    workflow_free(w);
}

static struct scripted_reply reply_then_judge(const struct llm_call *c, int agent, int item,
                                              int nth) {
    struct scripted_reply said = reply_many(c, agent, item, nth);
    if (c->reply == REPLY_JUDGE) said.choice = c->n_candidates - 1;
    return said;
}

static void test_many_answers_judged(void **state) {
    (void)state;
    struct agent team[TEAM_MAX];
    struct transcript o;
    struct workflow *w = workflow_of_yaml(
        "name: x\nrounds: 4\nnodes:\n  q: {reply: answer, messages: [{user: x}], temperature: 0}\n"
        "  j: {reply: judge, messages: [{user: x}]}\nedges:\n"
        "- {from: q, to: q, when: round < rounds}\n- {from: q, to: j}\ndecide: {judge: j}\n");
    for (int i = 0; i < TEAM_MAX; i++) team[i] = four_agents[i % 4];
    run_team(w, team, TEAM_MAX, &open_item, 1, default_options, reply_then_judge, &o);
    assert_int_equal(script.v[script.n - 1].n_candidates, 4 * 16);
    assert_int_equal(o.answer, 4 * 16 - 1);
    assert_true(o.v[o.n - 1].confidence == 0.7f);
    transcript_release(&o);
    workflow_free(w);
}

/* A text in tokens; the log-probability of token i is -2^i / 1024. */
enum { TOKENS_MAX = 16 };
struct tokens {
    char text[512];
    int32_t ends[TOKENS_MAX];
    float logprobs[TOKENS_MAX];
    int n;
    double sum; /* sum over the marked tokens */
    bool any;
};

static struct tokens tokens_of(char *line) {
    struct tokens t = {0};
    struct buf b = {0};
    unescape(line);
    for (char *rest = line, *one; rest; t.n++) {
        assert_true(t.n < TOKENS_MAX);
        one = rest;
        if ((rest = strstr(rest, "¦"))) *rest = 0, rest += strlen("¦");
        t.logprobs[t.n] = -(float)(1 << t.n) / 1024;
        if (strstr(one, "«")) t.sum += (double)t.logprobs[t.n], t.any = true;
        for (const char *p = one; *p;) {
            bool mark = strncmp(p, "«", 2) == 0 || strncmp(p, "»", 2) == 0;
            if (!mark) buf_add(&b, p, 1);
            p += mark ? 2 : 1;
        }
        t.ends[t.n] = (int32_t)b.len;
    }
    snprintf(t.text, sizeof t.text, "%s", b.data);
    buf_release(&b);
    return t;
}

static int tokens_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    const struct tokens *t = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        size_t bytes = (size_t)t->n * sizeof(int32_t);
        calls[i].text = xstrdup(t->text);
        calls[i].n_tokens = t->n;
        calls[i].ends = memcpy(xmalloc(bytes), t->ends, bytes);
        calls[i].logprobs = memcpy(xmalloc(bytes), t->logprobs, bytes);
    }
    return OK;
}

/* The confidence of a free answer is the product of the probabilities of the answer's tokens. */
static void test_free_confidence(void **state) {
    (void)state;
    struct buf file = {0};
    int n_line = 0, n_cases = 0;
    struct workflow *w = workflow_of_yaml("name: x\n" ASK);
    if (file_read("test/cases/workflow-free-answers.txt", 1 << 20, &file, &err) != OK)
        fail_msg("%s", err.text);
    for (char *rest = file.data, *line; (line = table_line(&rest, &n_line)); n_cases++) {
        char *text = strstr(line, " | ");
        if (!text) fail_msg("line %d: no bar", n_line);
        *text = 0;
        struct tokens t = tokens_of(text + 3);
        struct workflow_options o = default_options;
        struct transcript out = {0};
        if (*line != '-' && !(o.grader = grader_find(line, &err))) fail_msg("%s", err.text);
        const struct llm_client a = {&t, tokens_ask};
        assert_int_equal(workflow_run(w, &a, four_agents, 1, &open_item, 1, &o, &out, NULL, &err),
                         OK);
        const struct utterance *u = &out.v[0];
        if ((u->answer >= 0) != t.any) fail_msg("line %d: answer %d", n_line, u->answer);
        assert_int_equal(u->has_probability, t.any);
        if (fabs((double)u->confidence - (t.any ? exp(t.sum) : 1)) > 1e-6)
            fail_msg("line %d: sum %.0f/1024, not %.0f/1024 (%s)", n_line,
                     1024 * log((double)u->confidence), 1024 * t.sum, decision(&out));
        transcript_release(&out);
    }
    workflow_free(w);
    buf_release(&file);
    assert_true(n_cases > 12);
}

static struct scripted_reply reply_gold(const struct llm_call *c, int agent, int item, int nth) {
    static const char *const texts[] = {"answer: 1/2", "answer: 2", "", "answer: 0.50"};
    (void)c;
    return (struct scripted_reply){.text = texts[(agent + item + nth) % 4]};
}

/* The grader compares free answers with the item's gold: solo, voted, oracle, flips, contributions,
 * samples. An item without gold has no correct answer. */
static void test_free_answers_are_graded(void **state) {
    (void)state;
    static char gold[] = "0.5";
    struct task_item items[2] = {open_item, open_item};
    struct llm_client a = {NULL, script_ask, script_embed};
    struct debate d;
    struct self_consistency s;
    uint8_t right[2];
    struct workflow *w = workflow_of_yaml("name: x\n" ASK LOOP);
    struct debate_options o = {.workflow = w,
                               .rounds = 2,
                               .vote = vote_find("majority"),
                               .temperature = -1,
                               .grader = grader_find("math", &err)};
    items[0].gold = gold;
    script_reset();
    script = (struct script){.team = four_agents, .items = items, .respond = reply_gold, .w = w};
    assert_int_equal(debate_run(&a, four_agents, 4, items, 2, &o, &d, NULL, &err), OK);
    static const uint8_t solo[] = {1, 0, 0, 1}; // 1/2, 2, none, 0.50
    for (int i = 0; i < 4; i++) {
        assert_int_equal(d.first_correct[2 * i], solo[i]);
        assert_int_equal(d.first_correct[2 * i + 1], 0);
    }
    assert_true(d.vote_correct[0] == 1 && d.vote_correct[1] == 0); // two of three
    assert_true(d.flips_bad == 1 && d.flips_good == 1); // ada becomes wrong, 花 (none before)
                                                        // correct
    assert_int_equal(d.transcripts[0].n_candidates, 2);
    assert_true(d.transcripts[0].right[0] == 1 && d.transcripts[0].right[1] == 0);
    struct vote_game v = {o.vote, d.answers, items, 4, 2, d.transcripts};
    struct coalition_game game = vote_game(&v);
    uint8_t played[16 * 2];
    assert_int_equal(coalition_game_play_all(&game, played, &err), OK);
    assert_true(played[2 * 1] && !played[2 * 2] && !played[2 * 4] && played[2 * 9]);
    memset(script.nth, 0, sizeof script.nth);
    assert_int_equal(self_consistency_sample(&a, &four_agents[0], items, 2, 3, true, 0.7f, 9, 1,
                                             o.grader, &s, NULL, &err),
                     OK);
    self_consistency_vote(&s, items, 1, right); // "1/2"
    assert_true(right[0] == 1 && right[1] == 0);
    assert_true(s.answers[0].choice == 0 && s.answers[1].choice == 1 && s.answers[2].choice == -1);
    self_consistency_release(&s);
    debate_release(&d);
    workflow_free(w);
}

/* edges and items */

static struct scripted_reply reply_late_peace(const struct llm_call *c, int agent, int item,
                                              int nth) {
    (void)c;
    return (struct scripted_reply){.choice = nth >= item ? 1 : agent, .n_generated = 10};
}

/* Item i reaches consensus in round i + 1: each ends separately, and all share the steps. */
static void test_consensus(void **state) {
    (void)state;
    static const char yaml[] = "name: x\nrounds: 4\n" ASK
                               "edges: [{from: q, to: q, when: round < rounds and not agreed}]\n";
    struct task_item items[6] = {abc, abc, abc, abc, abc, abc};
    struct transcript o[6];
    struct workflow *w = workflow_of_yaml(yaml);
    run_team(w, four_agents, 3, items, 6, default_options, reply_late_peace, o);
    assert_int_equal(script.batches, 4);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(o[i].rounds, MIN(i + 1, 4));
        assert_int_equal(o[i].n, 3 * MIN(i + 1, 4));
        assert_int_equal(o[i].stop_reason, i < 4 ? WORKFLOW_STOP_CONSENSUS : WORKFLOW_STOP_ROUNDS);
        assert_string_equal(decision(&o[i]), i < 4 ? "b" : "a");
        transcript_release(&o[i]);
    }
    struct workflow_options fewer = default_options;
    fewer.rounds = 2;
    run_team(w, four_agents, 3, items, 6, fewer, reply_late_peace, o);
    assert_int_equal(script.batches, 2);
    for (int i = 0; i < 6; i++) transcript_release(&o[i]);
    workflow_free(w);
}

static struct scripted_reply reply_ten(const struct llm_call *c, int agent, int item, int nth) {
    (void)item;
    (void)nth;
    return (struct scripted_reply){.choice = agent % 3, .n_generated = MIN(10, c->max_tokens)};
}

/* A step that exceeds the limit does not begin, in turn or together; the vote counts earlier
 * utterances. */
static void test_budget_of_calls(void **state) {
    (void)state;
    for (int in_turn = 0; in_turn < 2; in_turn++)
        for (int calls = 1; calls < 12; calls++) {
            char yaml[300];
            snprintf(yaml, sizeof yaml,
                     "name: x\nbudget: {calls: %d}\nnodes: {q: {reply: answer, order: %s, "
                     "messages: [{user: x}]}}\n"
                     "edges: [{from: q, to: q}]\n",
                     calls, in_turn ? "in-turn" : "together");
            struct transcript o = run_one(yaml, 3, &abc, default_options, reply_ten);
            assert_int_equal(o.n, calls / 3 * 3);
            assert_int_equal(o.rounds, calls / 3);
            assert_int_equal(o.stop_reason, WORKFLOW_STOP_BUDGET);
            assert_string_equal(decision(&o), calls < 3 ? "nothing" : "a");
            transcript_release(&o);
        }
}

/* Never more tokens than the budget, and no call with a limit of 0 tokens. */
static void test_budget_of_tokens(void **state) {
    (void)state;
    for (int in_turn = 0; in_turn < 2; in_turn++)
        for (int tokens = 1; tokens < 80; tokens++) {
            char yaml[300];
            int spent = 0;
            snprintf(yaml, sizeof yaml,
                     "name: x\nbudget: {tokens: %d}\n"
                     "nodes: {q: {order: %s, max_tokens: 10, messages: [{user: x}]}}\n"
                     "edges: [{from: q, to: q}]\n",
                     tokens, in_turn ? "in-turn" : "together");
            struct transcript o = run_one(yaml, 3, &abc, default_options, reply_ten);
            for (int i = 0; i < o.n; i++) spent += o.v[i].n_generated;
            for (int i = 0; i < script.n; i++) assert_in_range(script.v[i].max_tokens, 1, 10);
            assert_true(spent <= tokens && tokens - spent < 3);
            assert_int_equal(o.n % 3, 0);
            assert_int_equal(o.stop_reason, WORKFLOW_STOP_BUDGET);
            transcript_release(&o);
        }
    struct workflow_options shorter = default_options;
    shorter.max_tokens = 7;
    struct transcript o = run_one("name: x\n" ASK, 2, &abc, shorter, reply_ten);
    assert_int_equal(script.v[0].max_tokens, 7);
    transcript_release(&o);
}

/* Advances by one on each read: at the start, and before every turn. */
static double ticks;
static double tick(void) {
    return ticks++;
}

/* No call begins after the time limit, and the vote counts earlier utterances; flags take
 * precedence over the file. */
static void test_budget_of_seconds(void **state) {
    (void)state;
    for (int in_turn = 0; in_turn < 2; in_turn++)
        for (int seconds = 1; seconds < 9; seconds++) {
            char yaml[300];
            snprintf(yaml, sizeof yaml,
                     "name: x\nbudget: {seconds: %d}\nnodes: {q: {reply: answer, order: %s, "
                     "messages: [{user: x}]}}\n"
                     "edges: [{from: q, to: q}]\n",
                     seconds < 5 ? seconds : 1, in_turn ? "in-turn" : "together");
            struct workflow_options o = default_options;
            o.clock = tick;
            if (seconds >= 5) o.seconds = seconds;
            ticks = 0;
            struct transcript t = run_one(yaml, 3, &abc, o, reply_ten);
            assert_int_equal(t.n, (seconds - 1) * (in_turn ? 1 : 3));
            assert_int_equal(t.stop_reason, WORKFLOW_STOP_BUDGET);
            assert_string_equal(decision(&t), seconds == 1 ? "nothing" : "a");
            transcript_release(&t);
        }
}

/* Cycles end if no agent has the role, if no edge leaves the cycle, and if nothing is generated. */
static void test_cycles_end(void **state) {
    (void)state;
    struct transcript o = run_one(
        "name: x\nroles: [a, b, c]\nnodes: {q: {reply: answer, by: c, messages: [{user: x}]}}\n"
        "edges: [{from: q, to: q}]\n",
        2, &abc, default_options, reply_own_number);
    assert_int_equal(o.n, 0);
    assert_int_equal(o.rounds, 0);
    assert_int_equal(o.stop_reason, WORKFLOW_STOP_BUDGET);
    transcript_release(&o);
    o = run_one("name: x\n" ASK "edges: [{from: q, to: q}]\n", 2, &abc, default_options,
                reply_own_number);
    assert_int_equal(o.n, 256);
    assert_int_equal(o.rounds, 128);
    assert_int_equal(o.stop_reason, WORKFLOW_STOP_BUDGET);
    transcript_release(&o);
    o = run_one("name: x\nroles: [a, b]\nnodes: {p: {by: b, messages: [{user: x}]}, q: {by: a, "
                "messages: [{user: y}]}}\nedges: [{from: p, to: q}]\n",
                1, &abc, default_options, reply_own_number);
    assert_int_equal(o.n, 1); // a node whose role has no agent is skipped
    assert_string_equal(script.v[0].messages, "user: y\n");
    transcript_release(&o);
}

/* The first edge whose condition holds is taken, for any number of steps. */
static void test_edges(void **state) {
    (void)state;
    static const char yaml[] = "name: x\nrounds: 9\nnodes:\n  a: {messages: [{user: a}]}\n"
                               "  b: {same_round: true, messages: [{user: \"b{{ round }}\"}]}\n"
                               "  c: {messages: [{user: \"c{{ round }}\"}]}\n"
                               "edges:\n- {from: a, to: c, when: candidates | length > 5}\n"
                               "- {from: a, to: b, when: \"'which' in question\"}\n- {from: a, to: "
                               "c}\n- {from: b, to: c}\n";
    struct transcript o = run_one(yaml, 1, &abc, default_options, reply_own_number);
    assert_string_equal(script.v[1].messages, "user: b1\n");
    assert_string_equal(script.v[2].messages, "user: c2\n");
    assert_int_equal(script.n, 3);
    transcript_release(&o);
    o = run_one(yaml, 1, &open_item, default_options, reply_free);
    assert_string_equal(script.v[1].messages, "user: c2\n");
    assert_int_equal(script.n, 2);
    transcript_release(&o);
}

/* judges */

static int judge_says; /* -1: it fails */

static struct scripted_reply reply_judged(const struct llm_call *c, int agent, int item, int nth) {
    (void)item;
    (void)nth;
    if (c->reply == REPLY_TEXT) return (struct scripted_reply){.text = "go on"};
    if (c->reply != REPLY_JUDGE)
        return (struct scripted_reply){.text = agent ? "answer: いいえ" : "answer: はい",
                                       .choice = agent};
    return (struct scripted_reply){.failed = judge_says < 0 ? "no room" : NULL,
                                   .choice = judge_says};
}

/* The judge's answer replaces the vote; if the judge fails, the vote decides. Without choices the
 * judge selects among the given answers. The judge's own answer has no vote. */
static void test_judge(void **state) {
    (void)state;
    struct workflow *w = workflow_open("mad", &err);
    assert_non_null(w);
    for (int free_form = 0; free_form < 2; free_form++)
        for (judge_says = -1; judge_says < 2; judge_says++) {
            struct transcript o;
            run_team(w, four_agents, 4, free_form ? &open_item : &abc, 1, default_options,
                     reply_judged, &o);
            assert_int_equal(o.answer, MAX(judge_says, 0));
            assert_int_equal(script.n, 2 * 3 + 1);
            assert_int_equal(script.v[6].agent, 3);
            assert_int_equal(script.v[6].n_candidates, free_form ? 2 : 3);
            assert_true(o.scores[0] == o.scores[1]); // one ballot each
            if (free_form) assert_string_equal(o.candidates[0], "はい");
            transcript_release(&o);
        }
    for (int n = 2; n < 4; n++) { // no judge: the vote decides
        struct transcript o;
        run_team(w, four_agents, n, &abc, 1, default_options, reply_judged, &o);
        assert_int_equal(script.n, 2 * n);
        assert_string_equal(decision(&o), "a");
        assert_int_equal(o.stop_reason, WORKFLOW_STOP_ROUNDS);
        assert_int_equal(o.rounds, 2);
        transcript_release(&o);
    }
    workflow_free(w);
}

/* visibility of messages */

/* Every built-in workflow: agent 0's first call is equal alone and in any team, with the same
 * seed. */
static void test_first_call_ignores_the_team(void **state) {
    (void)state;
    const char *name;
    for (int i = 0; (name = workflow_builtin(i, NULL)); i++) {
        struct workflow *w = workflow_open(name, &err);
        char *first = NULL;
        uint64_t seed = 0;
        for (int n = 1; n <= 4; n++) {
            struct transcript o;
            run_team(w, four_agents, n, &abc, 1, default_options, reply_own_number, &o);
            if (n == 1) first = xstrdup(script.v[0].messages);
            if (n == 1) seed = script.v[0].seed;
            assert_string_equal(script.v[0].messages, first);
            assert_true(script.v[0].seed == seed);
            transcript_release(&o);
        }
        free(first);
        workflow_free(w);
    }
}

/* The seed of a call depends on the agent's name and not on its position; other agents, items,
 * rounds and seeds give other values. */
static void test_seeds(void **state) {
    (void)state;
    static const char yaml[] = "name: x\nnodes: {q: {messages: [{user: x}]}}\n" LOOP;
    struct agent turned[3] = {four_agents[2], four_agents[0], four_agents[1]};
    struct task_item items[2] = {abc, abc};
    struct transcript o[2];
    struct workflow *w = workflow_of_yaml(yaml);
    uint64_t seeds[12];
    run_team(w, four_agents, 3, items, 2, default_options, reply_own_number, o);
    for (int i = 0; i < 12; i++) {
        seeds[i] = script.v[i].seed;
        for (int k = 0; k < i; k++) assert_true(seeds[k] != seeds[i]);
    }
    for (int i = 0; i < 2; i++) transcript_release(&o[i]);
    run_team(w, turned, 3, items, 2, default_options, reply_own_number, o);
    for (int i = 0; i < 12; i++)
        assert_true(script.v[i].seed == seeds[i - i % 3 + (i % 3 + 2) % 3]);
    for (int i = 0; i < 2; i++) transcript_release(&o[i]);
    struct workflow_options other = default_options;
    other.seed++;
    run_team(w, four_agents, 3, items, 2, other, reply_own_number, o);
    for (int i = 0; i < 12; i++) assert_true(script.v[i].seed != seeds[i]);
    for (int i = 0; i < 2; i++) transcript_release(&o[i]);
    other.temperature = 0; // a greedy call has no seed
    run_team(w, four_agents, 3, items, 2, other, reply_own_number, o);
    for (int i = 0; i < 12; i++) assert_true(script.v[i].seed == 0);
    for (int i = 0; i < 2; i++) transcript_release(&o[i]);
    workflow_free(w);
}

static char marks[ITEMS_MAX][24];

static struct scripted_reply reply_mark(const struct llm_call *c, int agent, int item, int nth) {
    (void)agent;
    (void)nth;
    return (struct scripted_reply){.text = marks[item],
                                   .choice = c->reply == REPLY_JUDGE ? 0 : agent % 2};
}

/* In every built-in workflow, calls of an item contain no text about other items. */
static void test_items_are_separate(void **state) {
    (void)state;
    enum { N = 12 };
    struct task_item items[N];
    struct transcript o[N];
    const char *name;
    for (int i = 0; i < N; i++) {
        snprintf(marks[i], sizeof marks[i], "印%c answer: %c", 'A' + i, 'A' + i);
        items[i] = i % 2 ? abc : open_item;
        items[i].question = marks[i];
    }
    for (int p = 0; (name = workflow_builtin(p, NULL)); p++) {
        struct workflow *w = workflow_open(name, &err);
        run_team(w, four_agents, 4, items, N, default_options, reply_mark, o);
        for (int i = 0; i < script.n; i++)
            for (const char *at = script.v[i].messages; (at = strstr(at, "印")); at += 3)
                if (at[3] != 'A' + script.v[i].item)
                    fail_msg("'%s': item %d hears of another:\n%s", name, script.v[i].item,
                             script.v[i].messages);
        for (int i = 0; i < N; i++) transcript_release(&o[i]);
        workflow_free(w);
    }
}

static struct scripted_reply reply_name(const struct llm_call *c, int agent, int item, int nth) {
    (void)c;
    (void)item;
    (void)nth;
    return (struct scripted_reply){.text = four_agents[agent].name, .choice = agent % 3};
}

/* Each agent sees every other agent once, in an order that depends on the item and is
 * reproducible. */
static void test_order_of_other_agents(void **state) {
    (void)state;
    enum { N = 60 };
    static const char yaml[] =
        "name: x\nnodes: {q: {messages: [{user: \"{% for o in others %}{{ o.text }} {% endfor %}\"}"
        "]}}\n" LOOP;
    struct task_item items[N];
    struct transcript o[N];
    int seen[4] = {0}, in_order = 0;
    char *first_run[N];
    struct workflow *w = workflow_of_yaml(yaml);
    for (int i = 0; i < N; i++) items[i] = abc;
    for (int turn = 0; turn < 2; turn++) {
        run_team(w, four_agents, 4, items, N, default_options, reply_name, o);
        for (int i = 0; i < N; i++) {
            const char *messages = script.v[4 * N + 4 * i].messages;
            assert_int_equal(script.v[4 * N + 4 * i].agent, 0);
            for (int a = 1; a < 4; a++) {
                assert_non_null(strstr(messages, four_agents[a].name));
                seen[a] += strncmp(messages + 6, four_agents[a].name, 3) == 0;
            }
            assert_null(strstr(messages, four_agents[0].name));
            in_order += strcmp(messages, "user: ben 花 dai \n") == 0;
            if (turn == 0)
                first_run[i] = xstrdup(messages);
            else
                assert_string_equal(messages, first_run[i]);
            transcript_release(&o[i]);
        }
    }
    for (int a = 1; a < 4; a++) assert_true(seen[a] > N / 4);
    assert_true(in_order < N);
    for (int i = 0; i < N; i++) free(first_run[i]);
    workflow_free(w);
}

/* ada selects, with probability 0.7; ben has no answer, 花 fails, and dai's call fails once. */
static struct scripted_reply reply_partly(const struct llm_call *c, int agent, int item, int nth) {
    (void)c;
    (void)item;
    if (agent == 2) return (struct scripted_reply){.failed = "the call has no room"};
    return (struct scripted_reply){.choice = agent == 1 ? -1 : nth == 0 ? agent % 3 : 1};
}

#define OTHERS                                                                                     \
    "messages: [{user: \"{% for o in others | sort(attribute='name') %}{{ o.name }}/{{ o.role }}/" \
    "{{ o.answer }}/{{ 'none' if o.confidence is none else (100 * o.confidence) | round | int }} " \
    "{% endfor %}| {{ 'none' if not own or own.confidence is none else "                           \
    "(100 * own.confidence) | round | int }}\"}]"

/* Others have their names, their roles and the probabilities of their answers. Without an answer,
 * and for a free answer whose tokens the client does not report, `confidence` has no value. */
static void test_other_agents_have_names(void **state) {
    (void)state;
    static const char yaml[] =
        "name: x\nroles: [pro, con]\nnodes: {q: {reply: answer, " OTHERS "}}\n" LOOP;
    struct workflow_options o = default_options;
    struct transcript out = run_one(yaml, 4, &abc, o, reply_partly);
    assert_int_equal(script.n, 8);
    assert_string_equal(script.v[0].messages, "user: | none\n");
    assert_string_equal(script.v[4].messages, "user: ben/con//none dai/con/a/70 | 70\n");
    assert_string_equal(script.v[5].messages, "user: ada/pro/a/70 dai/con/a/70 | none\n");
    assert_true(out.v[0].has_probability && !out.v[1].has_probability);
    transcript_release(&out);
    out = run_one(yaml, 2, &open_item, o, reply_gold);
    assert_string_equal(script.v[3].messages, "user: ada/pro/1/2/none | none\n");
    assert_true(!out.v[0].has_probability);
    transcript_release(&out);
}

/* Choices of the items of test_confer: all agree, one differs at first, and one always. */
static struct scripted_reply reply_confer(const struct llm_call *c, int agent, int item, int nth) {
    (void)c;
    return (struct scripted_reply){.choice = agent == 2 && (item == 2 || (item == 1 && nth == 0))};
}

/* "confer" asks again only where the agents differ. */
static void test_confer(void **state) {
    (void)state;
    const struct task_item items[3] = {abc, abc, abc};
    struct transcript o[3];
    struct workflow *w = workflow_open("confer", &err);
    assert_non_null(w);
    struct workflow_options more = default_options;
    more.rounds = 3;
    run_team(w, four_agents, 3, items, 3, more, reply_confer, o);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(o[i].rounds, i + 1);
        assert_int_equal(o[i].stop_reason, i < 2 ? WORKFLOW_STOP_CONSENSUS : WORKFLOW_STOP_ROUNDS);
        assert_string_equal(decision(&o[i]), "a");
        transcript_release(&o[i]);
    }
    assert_int_equal(script.n, 3 * 3 + 2 * 3 + 3);
    run_team(w, four_agents, 1, items, 1, more, reply_confer, o); // alone there is nothing to read
    assert_int_equal(script.n, 1);
    transcript_release(&o[0]);
    workflow_free(w);
}

static struct scripted_reply reply_long(const struct llm_call *c, int agent, int item, int nth) {
    static const char *const texts[] = {"一二三四五", "一二三四五六", "αβγδεζ", "abc", "😀😁😂😃😄😅"};
    (void)c;
    (void)nth;
    (void)item;
    return (struct scripted_reply){.text = texts[agent]};
}

/* The tail is cut at characters, not bytes, and a mark shows the cut. */
static void test_tail(void **state) {
    (void)state;
    static const char yaml[] =
        "name: x\nnodes: {q: {reply: text, tail: %s, messages: [{user: \"{{ own.text if own }}|"
        "{{ (transcript | map(attribute='text') | join('/')) }}\"}]}}\n" LOOP;
    static const char *const cut[] = {"一二三四五", "[...]\n二三四五六", "[...]\nβγδεζ", "abc",
                                      "[...]\n😁😂😃😄😅"};
    struct agent team[5] = {
        four_agents[0], four_agents[1], four_agents[2], four_agents[3], {.name = "eve"}};
    for (int whole = 0; whole < 2; whole++) {
        char text[400];
        struct transcript o;
        snprintf(text, sizeof text, yaml, whole ? "0" : "5");
        struct workflow *w = workflow_of_yaml(text);
        run_team(w, team, 5, &abc, 1, default_options, reply_long, &o);
        for (int a = 0; a < 5; a++) {
            struct buf want = {0};
            const struct scripted_reply said = reply_long(NULL, a, 0, 0);
            buf_printf(&want, "user: %s|", whole ? said.text : cut[a]);
            for (int i = 0; i < 5; i++)
                buf_printf(&want, "%s%s", whole ? reply_long(NULL, i, 0, 0).text : cut[i],
                           i < 4 ? "/" : "\n");
            assert_string_equal(script.v[5 + a].messages, want.data);
            assert_string_equal(o.v[a].text, said.text); // the stored utterance is complete
            buf_release(&want);
        }
        transcript_release(&o);
        workflow_free(w);
    }
}

/* errors */

static void test_refused(void **state) {
    (void)state;
    struct buf file = {0};
    int n = 0;
    if (file_read("test/cases/workflow-refused.txt", 1 << 20, &file, &err) != OK)
        fail_msg("%s", err.text);
    for (char *at = file.data, *want; (want = strstr(at, "\n=> ")); n++) {
        at += strspn(at, "\n");
        char *end = strchr(want + 4, '\n');
        want[1] = *end = 0;
        struct workflow *w = workflow_parse(at, strlen(at), "w.yaml", &err);
        if (w) fail_msg("accepted:\n%s", at);
        if (strcmp(err.text, want + 4) != 0)
            fail_msg("refused with\n%s\nnot with\n%s\n:\n%s", err.text, want + 4, at);
        assert_int_equal(err.code, ERR_FORMAT);
        at = end + 1;
    }
    assert_true(n > 40);
    buf_release(&file);
}

static void test_excessive_input_is_refused(void **state) {
    (void)state;
    struct buf b = {0};
    buf_printf(&b, "name: x\nnodes:\n");
    for (int i = 0; i < 65; i++) buf_printf(&b, "  n%d: {messages: [{user: x}]}\n", i);
    assert_null(workflow_parse(b.data, b.len, "w.yaml", &err));
    assert_string_equal(err.text,
                        "'w.yaml' line 2: between one and 64 nodes are expected in 'nodes'");
    b.len = 0;
    buf_printf(&b, "name: x\n" ASK "edges:\n");
    for (int i = 0; i < 257; i++) buf_printf(&b, "  - {from: q, to: q}\n");
    assert_null(workflow_parse(b.data, b.len, "w.yaml", &err));
    assert_string_equal(err.text,
                        "'w.yaml' line 3: a list of at most 256 edges is expected in 'edges'");
    buf_release(&b);
}

static void test_open(void **state) {
    (void)state;
    const char *name, *text;
    assert_null(workflow_open("nothing", &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_string_equal(err.text, "no protocol 'nothing'; 'shoal debate --protocols' lists them");
    assert_null(workflow_open("no/such.yaml", &err));
    assert_non_null(strstr(err.text, "'no/such.yaml'"));
    for (int i = 0; (name = workflow_builtin(i, &text)); i++) {
        struct buf file = {0};
        char *path = xasprintf("protocols/%s.yaml", name);
        struct workflow *w = workflow_open(path, &err);
        if (!w) fail_msg("%s", err.text);
        assert_string_equal(workflow_name(w), name);
        assert_true(*workflow_description(w) && workflow_rounds(w) >= 2);
        assert_int_equal(file_read(path, 1 << 20, &file, &err), OK);
        assert_string_equal(text, file.data); // the program contains the file itself
        buf_release(&file);
        workflow_free(w);
        free(path);
    }
    assert_null(workflow_builtin(-1, &text));
}

/* An error that only occurs when a template is rendered contains the names of the workflow and the
 * node; nothing leaks. */
static void test_template_errors(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"name: x\nnodes: {q: {messages: [{user: \"{{ nobody.name }}\"}]}}\n",
         "workflow 'x', node 'q', template: "},
        {"name: x\n" ASK "edges: [{from: q, to: q, when: nobody.name}]\n",
         "workflow 'x', condition of an edge: "},
        {"name: x\nnodes: {q: {messages: [{user: \"{{ raise_exception('没有') }}\"}]}}\n", "没有"}};
    for (int i = 0; i < 3; i++) {
        struct transcript o[2] = {0};
        struct task_item items[2] = {abc, open_item};
        struct llm_client a = {NULL, script_ask, script_embed};
        struct workflow *w = workflow_of_yaml(cases[i][0]);
        script_reset();
        script.team = four_agents;
        script.items = items;
        script.respond = reply_own_number;
        script.w = w;
        assert_int_not_equal(
            workflow_run(w, &a, four_agents, 3, items, 2, &default_options, o, NULL, &err), OK);
        if (!strstr(err.text, cases[i][1])) fail_msg("'%s', not '%s'", err.text, cases[i][1]);
        for (int k = 0; k < 2; k++) transcript_release(&o[k]);
        workflow_free(w);
    }
    struct transcript o = {0};
    struct workflow *w = workflow_of_yaml("name: x\n" ASK);
    struct llm_client a = {NULL, script_ask, script_embed};
    assert_int_equal(workflow_run(w, &a, four_agents, 0, &abc, 1, &default_options, &o, NULL, &err),
                     ERR_USAGE);
    assert_int_equal(
        workflow_run(w, &a, four_agents, 18, &abc, 1, &default_options, &o, NULL, &err), ERR_USAGE);
    assert_string_equal(err.text, "a team has 1 to 17 agents, not 18");
    struct task_item bytes[2] = {open_item, abc};
    bytes[0].question = TEXT("何\xff");
    assert_int_equal(
        workflow_run(w, &a, four_agents, 2, bytes, 1, &default_options, &o, NULL, &err),
        ERR_FORMAT);
    assert_string_equal(err.text, "a question is not UTF-8");
    transcript_release(&o);
    bytes[1].choices[2] = TEXT("\xe6\xb5");
    assert_int_equal(
        workflow_run(w, &a, four_agents, 2, bytes + 1, 1, &default_options, &o, NULL, &err),
        ERR_FORMAT);
    assert_string_equal(err.text, "a possible answer is not UTF-8");
    transcript_release(&o);
    workflow_free(w);
    script_reset();
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_protocols),
        cmocka_unit_test(test_legacy_votes),
        cmocka_unit_test(test_legacy_rules_naive),
        cmocka_unit_test(test_tie),
        cmocka_unit_test(test_equal_free_answers),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_invalid_free_answers),
        cmocka_unit_test(test_many_answers),
        cmocka_unit_test(test_many_answers_judged),
        cmocka_unit_test(test_free_confidence),
        cmocka_unit_test(test_free_answers_are_graded),
        cmocka_unit_test(test_consensus),
        cmocka_unit_test(test_budget_of_calls),
        cmocka_unit_test(test_budget_of_tokens),
        cmocka_unit_test(test_budget_of_seconds),
        cmocka_unit_test(test_cycles_end),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_judge),
        cmocka_unit_test(test_first_call_ignores_the_team),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_items_are_separate),
        cmocka_unit_test(test_order_of_other_agents),
        cmocka_unit_test(test_other_agents_have_names),
        cmocka_unit_test(test_confer),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_excessive_input_is_refused),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_template_errors),
    };
    if (argc == 2 && strcmp(argv[1], "--write") == 0) return protocols_write();
    int failed = cmocka_run_group_tests(tests, quiet, NULL);
    script_reset();
    return failed;
}
