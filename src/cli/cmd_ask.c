/*
 * shoal ask: a team answers a question. Agents with roles think in one batch, a summary is made,
 * they think again, and one of them writes the answer; the graph is protocols/panel.yaml. All that
 * is said stands on a blackboard in the store, under the keys of the pipeline.
 *
 * Without a question, questions are read from stdin, a line each.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "memory/memory.h"
#include "swarm/blackboard.h"
#include "swarm/roles.h"
#include "swarm/workflow.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct options {
    struct setup_options setup;
    struct strings adapters;
    char *role_type, *language, *knowledge, *conversation, *protocol;
    int64_t agents, iterations, max_tokens, seed;
    double temperature, output_temp, summary_temp;
    bool summary, board;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("agents", OPT_INT, agents, "3", 1, TEAM_MAX - 2, "N", "agents that think"),
    ROW("iterations", OPT_INT, iterations, "2", 1, 16, "N", "times that they think"),
    ROW("adapters", OPT_LIST, adapters, NULL, 0, 0, "DIR …",
        "of the agents in turn; 'base' is the bare model"),
    ROW("role-type", OPT_STRING, role_type, "auto", 0, 0, "NAME",
        "roles: discussion, planning, informational, conversational, default; auto: by the "
        "question"),
    ROW("language", OPT_STRING, language, "auto", 0, 0, "LANG",
        "ja, en or zh; auto: the question's"),
    ROW("summary", OPT_BOOL, summary, "true", 0, 0, NULL, "a summary after each time"),
    ROW("knowledge", OPT_STRING, knowledge, NULL, 0, 0, "DB",
        "what 'shoal knowledge' made: what it has on the question is shown to the agents"),
    ROW("conversation", OPT_STRING, conversation, NULL, 0, 0, "ID",
        "remember what is said under this name, and what was"),
    ROW("protocol", OPT_STRING, protocol, "panel", 0, 0, "FILE", "another workflow of these roles"),
    ROW("temperature", OPT_FLOAT, temperature, "-1", -1, 100, "X",
        "of everybody (-1: each role's own)"),
    ROW("output-temp", OPT_FLOAT, output_temp, "0.7", 0.01, 100, "X", "of who writes the answer"),
    ROW("summary-temp", OPT_FLOAT, summary_temp, "0.3", 0.01, 100, "X", "of who sums up"),
    ROW("max-tokens", OPT_INT, max_tokens, "0", 0, 65536, "N",
        "of every turn (0: the workflow's own)"),
    ROW("board", OPT_BOOL, board, NULL, 0, 0, NULL, "print the blackboard at the end"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "of what is drawn"),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

enum { REFERENCE_CHARS = 500, CONTEXT_CHARS = 1500, SUMMARY_TOKENS = 256, ASK_WORK = 32 << 20 };

struct team {
    const struct common *c;
    const struct options *o;
    struct setup *st;
    struct workflow *w;
    struct speaker speaker;
    struct asker asker;
    struct store *store;
    struct blackboard *board;
    struct conversation *memory; /* NULL: nothing is remembered */
    struct knowledge *knowledge; /* NULL: none */
    struct agent v[TEAM_MAX];
    char *system[TEAM_MAX], *names[TEAM_MAX];
    struct adapter *adapters[TEAM_MAX];
    int n, steps[TEAM_MAX]; /* how often each has spoken on this question */
};

static double now(void *ctx) {
    (void)ctx;
    return (double)time(NULL);
}

static int board_put(struct team *t, const char *key, const char *text, struct error *err) {
    json_t *value = json_string(text ? text : ""),
           *event = value ? blackboard_write(t->board, key, value, NULL, err) : NULL;
    json_decref(value);
    json_decref(event);
    return event ? OK : value ? err->code : error_set(err, ERR_FORMAT, "'%s' is not UTF-8", key);
}

/* What an agent has said goes to the board as soon as it is there. */
static int ask_and_write(void *ctx, struct call *calls, int n, struct error *err) {
    struct team *t = ctx;
    struct asker inner = speaker_asker(&t->speaker);
    int rc = inner.ask(inner.ctx, calls, n, err);
    for (int i = 0; rc == OK && i < n; i++) {
        char key[BOARD_KEY_LEN] = BOARD_FINAL_RESPONSE;
        int who = (int)(calls[i].agent - t->v);
        if (who == t->n) board_summary_key(t->steps[who], key);
        if (who < t->n) board_agent_key(who, key);
        t->steps[who]++;
        rc = board_put(t, key, calls[i].text, err);
    }
    return rc;
}

static int adapters_load(struct team *t, struct error *err) {
    const struct strings *dirs = &t->o->adapters;
    if (dirs->n > t->n) return error_set(err, ERR_USAGE, "there are more --adapters than --agents");
    for (int i = 0; i < dirs->n; i++)
        if (strcmp(dirs->v[i], "base") != 0 &&
            !(t->adapters[i] = setup_adapter(t->st, dirs->v[i], err)))
            return err->code;
    return OK;
}

static int team_open(struct team *t, struct error *err) {
    const struct options *o = t->o;
    t->n = (int)o->agents;
    int rc = adapters_load(t, err);
    if (rc == OK) rc = setup_engine(t->st, err);
    if (rc) return rc;
    if (!(t->store = setup_store(t->st, err))) return err->code;
    t->speaker = (struct speaker){.engine = t->st->e, .model = t->st->m, .store = t->store};
    t->asker = (struct asker){t, ask_and_write};
    const struct blackboard_options bo = {
        .store = t->store, .name = o->conversation ? o->conversation : "ask", .clock = now};
    if (!(t->board = blackboard_open(&bo, err))) return err->code;
    if (o->conversation && !(t->memory = conversation_open(t->store, o->conversation, err)))
        return err->code;
    if (o->knowledge && !(t->knowledge = knowledge_open(o->knowledge, false, err)))
        return err->code;
    return OK;
}

static void roles_release(struct team *t) {
    for (int i = 0; i < TEAM_MAX; i++) {
        free(t->system[i]);
        free(t->names[i]);
        t->system[i] = t->names[i] = NULL;
    }
}

static void team_close(struct team *t) {
    roles_release(t);
    knowledge_close(t->knowledge);
    conversation_close(t->memory);
    blackboard_close(t->board);
    store_close(t->store);
}

/* The roles of a kind of question; then who sums up, and who answers. */
static void roles_take(struct team *t, enum question_type type, enum language lang) {
    roles_release(t);
    memset(t->steps, 0, sizeof t->steps);
    for (int i = 0; i < t->n; i++) {
        struct role r = role_get(type, lang, i);
        t->names[i] = xasprintf("%d %s", i + 1, r.name);
        t->system[i] = xasprintf("%s\n%s", r.name, r.description);
        t->v[i] = (struct agent){.name = t->names[i],
                                 .system = t->system[i],
                                 .adapter = t->adapters[i],
                                 .role = "agent",
                                 .temperature = r.temperature};
    }
    t->v[t->n] = (struct agent){
        .name = "summary", .role = "summary", .temperature = (float)t->o->summary_temp};
    t->v[t->n + 1] =
        (struct agent){.name = "output", .role = "output", .temperature = (float)t->o->output_temp};
}

static int language_pick(const struct options *o, const char *question, enum language *out,
                         struct error *err) {
    *out = language_of(question);
    if (strcmp(o->language, "auto") == 0) return OK;
    for (int i = 0; i < N_LANGUAGES; i++)
        if (strcmp(language_names[i], o->language) == 0) return *out = (enum language)i, OK;
    return error_set(err, ERR_USAGE, "no language '%s'; there are ja, en and zh", o->language);
}

static int type_pick(const struct options *o, const char *question, enum question_type *out,
                     struct error *err) {
    int type = question_type_find(o->role_type);
    *out = question_classify(question, false);
    if (strcmp(o->role_type, "auto") == 0) return OK;
    if (type < 0) return error_set(err, ERR_USAGE, "no roles of type '%s'", o->role_type);
    *out = (enum question_type)type;
    return OK;
}

/* What templates see beside the question; all of it stands on the board. */
static int given_make(struct team *t, const char *question, enum question_type type,
                      enum language lang, json_t **out, struct error *err) {
    struct buf context = {0}, rag = {0};
    int rc = OK;
    buf_puts(&context, "");
    buf_puts(&rag, "");
    if (t->memory) conversation_context(t->memory, lang, CONTEXT_CHARS, &context);
    if (t->knowledge) {
        const struct knowledge_query q = {.text = question};
        json_t *hits = knowledge_search(t->knowledge, &q, err);
        if (!hits) rc = err->code;
        if (hits) knowledge_snippets(hits, REFERENCE_CHARS, &rag);
        json_decref(hits);
    }
    if (rc == OK) rc = board_put(t, BOARD_INPUT, question, err);
    if (rc == OK) rc = board_put(t, BOARD_QUESTION_TYPE, question_type_names[type], err);
    if (rc == OK) rc = board_put(t, BOARD_CONVERSATION, context.data, err);
    if (rc == OK) rc = board_put(t, BOARD_RAG, rag.data, err);
    *out =
        json_pack("{s:b,s:s,s:s,s:s}", "summary", (int)t->o->summary, "rag", rag.data,
                  "conversation_context", context.data, "question_type", question_type_names[type]);
    buf_release(&context);
    buf_release(&rag);
    return rc;
}

/* What is about to be forgotten becomes a summary by the agent that sums up. */
static int memory_summarize(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                            struct error *err) {
    static const char *const words[N_LANGUAGES] = {
        [LANG_EN] = "Sum up the conversation in a few sentences. Keep names, wishes and facts.",
        [LANG_JA] = "会話を数文に要約してください。名前、希望、事実は残してください。",
        [LANG_ZH] = "请用几句话概括这段对话，保留名字、愿望和事实。"};
    struct team *t = ctx;
    struct asker asker = speaker_asker(&t->speaker);
    char *text = xasprintf("%s%s%s", previous, *previous ? "\n" : "", exchanges);
    const struct message chat[2] = {{"system", words[language_of(exchanges)]}, {"user", text}};
    const struct agent writer = {.name = "memory"};
    const struct item item = {.correct = -1};
    struct call c = {.agent = &writer,
                     .item = &item,
                     .messages = chat,
                     .n_messages = 2,
                     .reply = REPLY_TEXT,
                     .max_tokens = t->o->max_tokens ? (int32_t)t->o->max_tokens : SUMMARY_TOKENS};
    int rc = asker.ask(asker.ctx, &c, 1, err);
    if (rc == OK) buf_puts(out, c.failed ? previous : c.text);
    call_release(&c);
    free(text);
    return rc;
}

static void talk_print(const struct team *t, const struct talk *talk, const char *answer) {
    if (!t->c->json) {
        printf("%s\n", answer);
        return;
    }
    json_t *said = json_array();
    for (int i = 0; i < talk->n; i++) {
        const struct utterance *u = &talk->v[i];
        json_array_append_new(said, json_pack("{s:s,s:i,s:s}", "name", t->v[u->agent].name, "round",
                                              u->round, "text", u->text));
    }
    json_t *line = json_pack("{s:s,s:o}", "answer", answer, "said", said);
    if (t->o->board) json_object_set_new(line, "board", blackboard_debug_view(t->board));
    cli_print(line);
}

static void board_print(const struct team *t) {
    json_t *view = blackboard_debug_view(t->board);
    char *text = json_dumps(view, JSON_INDENT(2));
    printf("%s\n", text);
    free(text);
    json_decref(view);
}

/* The team's work on one question; `answer` gets its words. */
static int team_think(struct team *t, const char *question, enum language lang, const json_t *given,
                      struct talk *talk, struct error *err) {
    char *copy = xstrdup(question);
    const struct item item = {.question = copy, .lang = language_names[lang], .correct = -1};
    const struct workflow_options wo = {.rounds = (int)t->o->iterations,
                                        .temperature = (float)t->o->temperature,
                                        .max_tokens = (int32_t)t->o->max_tokens,
                                        .seed = (uint64_t)t->o->seed,
                                        .given = given};
    int rc = workflow_run(t->w, &t->asker, t->v, t->n + 2, &item, 1, &wo, talk, NULL, err);
    if (rc == OK && talk->final < 0)
        rc = error_set(err, ERR_STATE, "nobody had an answer; the context may be too small");
    free(copy);
    return rc;
}

static int answer(struct team *t, const char *question, struct error *err) {
    enum language lang;
    enum question_type type;
    struct talk talk = {0};
    struct buf known = {0};
    json_t *given = NULL;
    int rc = language_pick(t->o, question, &lang, err);
    if (rc == OK) rc = type_pick(t->o, question, &type, err);
    if (rc == OK) rc = blackboard_clear_current_turn(t->board, err);
    if (rc) return rc;
    bool remembered = t->memory && conversation_answer(t->memory, question, &known);
    if (remembered) {
        rc = board_put(t, BOARD_FINAL_RESPONSE, known.data, err);
    } else {
        roles_take(t, type, lang);
        rc = given_make(t, question, type, lang, &given, err);
        if (rc == OK) rc = team_think(t, question, lang, given, &talk, err);
    }
    if (rc == OK) {
        const char *text = remembered ? known.data : talk.v[talk.final].text;
        talk_print(t, &talk, text);
        const struct summarizer s = {t, memory_summarize};
        if (t->memory) rc = conversation_add(t->memory, question, text, &s, err);
    }
    if (rc == OK && t->o->board && !t->c->json) board_print(t);
    json_decref(given);
    buf_release(&known);
    talk_release(&talk);
    return rc;
}

static int answer_lines(struct team *t, struct error *err) {
    char *line = NULL;
    size_t size = 0;
    int rc = OK;
    for (ssize_t n; rc == OK && (n = getline(&line, &size, stdin)) >= 0;) {
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
        if (n > 0) rc = answer(t, line, err);
        fflush(stdout);
    }
    free(line);
    return rc;
}

static int run(const struct common *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct setup_wants wants = {
        .engine = {.max_rows = 512, .max_seqs = 32}, .adapters = &o->adapters, .work = ASK_WORK};
    struct setup st;
    struct workflow *w = workflow_open(o->protocol, err);
    if (!w) return err->code;
    int rc = setup_open(&st, c, &o->setup, args->v[0], &wants, err);
    if (rc == OK && st.m) {
        struct team t = {.c = c, .o = o, .st = &st, .w = w};
        if (!st.m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", st.path);
        if (rc == OK) rc = team_open(&t, err);
        if (rc == OK) rc = args->n > 1 ? answer(&t, args->v[1], err) : answer_lines(&t, err);
        team_close(&t);
    }
    rc = setup_close(&st, rc, err);
    workflow_free(w);
    return rc;
}

const struct command cmd_ask = {
    .name = "ask",
    .args = "MODEL [QUESTION]",
    .summary = "a team with roles thinks about a question and answers it",
    .about =
        "Agents with roles (by the kind of question) think in one batch, a summary is made, "
        "they think again, and one of them\n"
        "writes the answer. Everything stands on a blackboard in the store (--board). Without "
        "a question, questions are read\n"
        "from stdin, a line each; --conversation remembers them.\n\n"
        "  shoal ask model.gguf --agents 3 --iterations 2 'ニュートンの第二法則とは何ですか？'\n"
        "  shoal ask model.gguf --knowledge notes.db --conversation me",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run,
};
