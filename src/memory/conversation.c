/*
 * conversation: exchanges, a summary and facts about the user. It also answers questions about
 * these facts without a model.
 *
 * The state is one JSON object, {exchanges: [{user, assistant}], summary, facts, last}, which is
 * also the document in the store; `last` is the number of the last exchange, and `bytes` the size
 * of the log. A change is one transaction, in which the document is read again, because another
 * process may have changed it, and written with the change. Then it becomes the state. After an
 * error, store and state are unchanged. Every exchange is also an event of a log
 * (conversation_list.c), in the same transaction, and stays there when it leaves the state.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Limits in conversation_facts_schema: characters per text, items per list. */
enum { SCHEMA_CHARS = 40, SCHEMA_ITEMS = 4 };
enum { SUMMARY_ATTEMPTS = 4 };
enum fact { FACT_NAME, FACT_INTERESTS, FACT_LIKES, FACT_OTHER, N_FACTS };

/* The stored keys (docs/COMPATIBILITY.md), and other names that a model may use. */
static const struct {
    const char *key, *also;
} facts[N_FACTS] = {
    [FACT_NAME] = {"名前", "name|名字|姓名"},
    [FACT_INTERESTS] = {"興味", "趣味|interests|interest|hobbies|hobby|兴趣|爱好"},
    [FACT_LIKES] = {"好きなもの", "likes|favorites|favourites|喜欢|喜欢的东西"},
    [FACT_OTHER] = {"その他の情報", "other|other information|其他|其他信息"},
};

struct conversation {
    struct store *store;
    char *id, *log;
    json_t *state;
};

static json_t *state_new_empty(void) {
    return json_pack("{s:[],s:s,s:{},s:i}", "exchanges", "summary", "", "facts", "last", 0);
}

/* Validates a stored document. */
static bool state_is_valid(const json_t *state) {
    const json_t *exchanges = json_object_get(state, "exchanges"), *v,
                 *known = json_object_get(state, "facts"), *last = json_object_get(state, "last");
    size_t i;
    json_array_foreach (exchanges, i, v)
        if (!json_is_string(json_object_get(v, "user")) ||
            !json_is_string(json_object_get(v, "assistant")))
            return false;
    for (int f = 0; f < N_FACTS; f++) {
        v = json_object_get(known, facts[f].key);
        if (v && !(f == FACT_NAME ? json_is_string(v) : json_is_string_array(v))) return false;
    }
    return json_is_array(exchanges) && json_is_object(known) &&
           json_is_string(json_object_get(state, "summary")) && (!last || json_is_integer(last));
}

/* The document in the store, or an empty state; NULL sets err. A document of version 0.1 has no
 * log: *has_log becomes false, and the numbers of its exchanges begin at 1. */
static json_t *state_read(const struct conversation *c, bool *has_log, struct error *err) {
    json_t *state = store_document_get(c->store, CONVERSATION_KIND, c->id, err);
    *has_log = true;
    if (!state && err->code == ERR_MISSING) return state_new_empty();
    if (state && !state_is_valid(state)) {
        error_set(err, ERR_FORMAT, "conversation '%s' is damaged", c->id);
        json_decref(state);
        return NULL;
    }
    *has_log = !state || json_object_get(state, "last");
    if (!*has_log) {
        size_t n = json_array_size(json_object_get(state, "exchanges"));
        json_object_set_new(state, "last", json_integer((json_int_t)n));
    }
    return state;
}

struct conversation *conversation_open(struct store *s, const char *id, struct error *err) {
    struct conversation *c = xcalloc(1, sizeof *c);
    bool has_log;
    *c = (struct conversation){s, xstrdup(id), conversation_log_name(id), NULL};
    c->state = s ? state_read(c, &has_log, err) : state_new_empty();
    if (c->state) return c;
    conversation_close(c);
    return NULL;
}

void conversation_close(struct conversation *c) {
    if (!c) return;
    json_decref(c->state);
    free(c->log);
    free(c->id);
    free(c);
}

int conversation_refresh(struct conversation *c, struct error *err) {
    bool has_log;
    json_t *next = c->store ? state_read(c, &has_log, err) : json_incref(c->state);
    if (!next) return err->code;
    json_decref(c->state);
    c->state = next;
    return OK;
}

const json_t *conversation_state(const struct conversation *c) {
    return c->state;
}

static int64_t last_number(const json_t *state) {
    return json_integer_value(json_object_get(state, "last"));
}

/* The number of the first exchange in `state`. */
static int64_t first_number(const json_t *state) {
    return last_number(state) - (int64_t)json_array_size(json_object_get(state, "exchanges")) + 1;
}

/* A change of the state. `apply` changes `state`, or returns an error. */
struct change {
    int (*apply)(json_t *state, void *arg, struct error *err);
    void *arg;
    const json_t *exchange; /* added to the log, or NULL */
    bool clears;            /* deletes the log */
};

static int log_write(struct conversation *c, const json_t *state, const struct change *ch,
                     struct error *err) {
    if (ch->clears) return store_log_delete(c->store, c->log, err);
    if (!ch->exchange) return OK;
    json_t *events = json_pack("[O]", ch->exchange);
    int rc = store_log_append(c->store, c->log, last_number(state), events, err);
    json_decref(events);
    return rc;
}

/* The transaction of a change; *state receives the new state. Without a log, the exchanges become
 * its first events. */
static int change_store(struct conversation *c, const struct change *ch, json_t **state,
                        struct error *err) {
    bool has_log;
    int rc = store_begin(c->store, err);
    if (rc != OK) return rc;
    if (!(*state = state_read(c, &has_log, err))) rc = err->code;
    if (rc == OK && !has_log)
        rc = store_log_append(c->store, c->log, 1, json_object_get(*state, "exchanges"), err);
    if (rc == OK) rc = ch->apply(*state, ch->arg, err);
    if (rc == OK) rc = log_write(c, *state, ch, err);
    if (rc == OK) rc = store_document_put(c->store, CONVERSATION_KIND, c->id, *state, err);
    if (rc == OK) rc = store_commit(c->store, err);
    if (rc != OK) store_rollback(c->store);
    return rc;
}

static int state_change(struct conversation *c, const struct change *ch, struct error *err) {
    json_t *next = NULL;
    int rc;
    if (c->store) {
        rc = change_store(c, ch, &next, err);
    } else {
        next = json_deep_copy(c->state);
        rc = ch->apply(next, ch->arg, err);
    }
    json_decref(rc == OK ? c->state : next);
    if (rc == OK) c->state = next;
    return rc;
}

/* The numbers of the exchanges continue, so that another process that has the conversation open
 * does not mistake new exchanges for old ones. */
static int clear(json_t *state, void *arg, struct error *err) {
    (void)arg;
    (void)err;
    json_t *next = state_new_empty(), *last = json_object_get(state, "last");
    json_object_set(next, "last", last);
    json_object_set(next, "cleared", last);
    json_object_clear(state);
    json_object_update(state, next);
    json_decref(next);
    return OK;
}

int conversation_clear(struct conversation *c, struct error *err) {
    const struct change ch = {.apply = clear, .clears = true};
    return state_change(c, &ch, err);
}

/* exchanges */

/* A text, truncated to CONVERSATION_MAX_TEXT bytes of whole characters; NULL when it is not UTF-8.
 */
static json_t *text_to_json(const char *text) {
    size_t n = strlen(text);
    if (n > CONVERSATION_MAX_TEXT)
        for (n = CONVERSATION_MAX_TEXT; n && ((uint8_t)text[n] & 0xC0) == 0x80; n--) continue;
    return json_stringn(text, n);
}

/* An exchange of the log as one of the state. */
static json_t *exchange_truncate(const json_t *v) {
    return json_pack("{s:o,s:o}", "user", text_to_json(json_get_string(v, "user")), "assistant",
                     text_to_json(json_get_string(v, "assistant")));
}

static const struct {
    const char *summary, *known, *user, *assistant, *comma, *colon;
} labels[N_LANGUAGES] = {
    [LANG_JA] = {"これまでの要約", "覚えていること", "ユーザー", "アシスタント", "、", "："},
    [LANG_EN] = {"Summary so far", "Known facts", "User", "Assistant", ", ", ": "},
    [LANG_ZH] = {"此前的摘要", "已知信息", "用户", "助手", "、", "："},
};

static void exchange_append(struct buf *out, const json_t *v, enum language l) {
    buf_printf(out, "%s%s%s\n%s%s%s\n", labels[l].user, labels[l].colon, json_get_string(v, "user"),
               labels[l].assistant, labels[l].colon, json_get_string(v, "assistant"));
}

/* A summary of the exchanges up to number `through`. */
struct summary {
    json_t *text; /* NULL: the old summary stays */
    int64_t first, through;
};

/* Summarises the n oldest exchanges of the state and the previous summary. This may take long, so
 * it is not a part of a transaction. */
static int oldest_summarize(const struct conversation *c, size_t n, const struct summarizer *s,
                            struct summary *out, struct error *err) {
    struct buf transcript = {0}, text = {0};
    *out = (struct summary){.first = first_number(c->state)};
    out->through = out->first + (int64_t)n - 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(json_object_get(c->state, "exchanges"), i);
        exchange_append(&transcript, v, language_detect(json_get_string(v, "user")));
    }
    int rc =
        s->summarize(s->ctx, json_get_string(c->state, "summary"), transcript.data, &text, err);
    if (rc == OK && text.len && !(out->text = text_to_json(text.data)))
        rc = error_set(err, ERR_FORMAT, "the summary of a conversation is not UTF-8 text");
    buf_release(&transcript);
    buf_release(&text);
    return rc;
}

/* An exchange that is added. If the state is full, exchanges are removed first: those of `summary`,
 * or without one the oldest exchange. */
struct addition {
    json_t *exchange;              /* {at, user, assistant} */
    bool summarized;               /* false: exchanges are removed without a summary */
    const struct summary *summary; /* NULL: the state that this process knows is not full */
    bool outdated; /* result: the state is full, and `summary` is not of its oldest exchanges */
};

static int exchange_apply(json_t *state, void *arg, struct error *err) {
    struct addition *a = arg;
    const struct summary *s = a->summary;
    json_t *exchanges = json_object_get(state, "exchanges");
    bool current = s && s->first == first_number(state);
    a->outdated =
        a->summarized && !current && json_array_size(exchanges) >= CONVERSATION_MAX_EXCHANGES;
    if (a->outdated) return error_set(err, ERR_STATE, "another process changed the conversation");
    for (int64_t i = s ? s->first : 0; current && i <= s->through; i++)
        json_array_remove(exchanges, 0);
    if (current && s->text) json_object_set(state, "summary", s->text);
    while (json_array_size(exchanges) >= CONVERSATION_MAX_EXCHANGES)
        json_array_remove(exchanges, 0);
    json_array_append_new(exchanges, exchange_truncate(a->exchange));
    json_object_set_new(state, "last", json_integer(last_number(state) + 1));
    json_object_set_new(state, "bytes",
                        json_integer(json_integer_value(json_object_get(state, "bytes")) +
                                     (json_int_t)json_dumpb(a->exchange, NULL, 0, 0)));
    json_object_set(state, "updated", json_object_get(a->exchange, "at"));
    return OK;
}

/* Adds an exchange; `full`: summarises the older half of the exchanges first. */
static int exchange_add(struct conversation *c, struct addition *a, const struct summarizer *s,
                        bool full, struct error *err) {
    struct summary summary = {0};
    const size_t n = json_array_size(json_object_get(c->state, "exchanges"));
    const struct change ch = {.apply = exchange_apply, .arg = a, .exchange = a->exchange};
    int rc = full ? oldest_summarize(c, n - CONVERSATION_MAX_EXCHANGES / 2, s, &summary, err) : OK;
    a->summary = full ? &summary : NULL;
    if (rc == OK) rc = state_change(c, &ch, err);
    json_decref(summary.text);
    return rc;
}

/* Takes ownership of `exchange`. Summarises again while other processes change the conversation, at
 * most SUMMARY_ATTEMPTS times. */
static int event_add(struct conversation *c, json_t *exchange, const struct summarizer *s,
                     struct error *err) {
    int rc = OK;
    for (int i = 0; i <= SUMMARY_ATTEMPTS; i++) {
        struct addition a = {.exchange = exchange, .summarized = s && i < SUMMARY_ATTEMPTS};
        size_t n = json_array_size(json_object_get(c->state, "exchanges"));
        rc = exchange_add(c, &a, s, a.summarized && n >= CONVERSATION_MAX_EXCHANGES, err);
        if (!a.outdated || (rc = conversation_refresh(c, err)) != OK) break;
    }
    json_decref(exchange);
    return rc;
}

int conversation_add(struct conversation *c, const char *user, const char *assistant,
                     const struct summarizer *s, struct error *err) {
    char now[32];
    json_t *exchange =
        json_pack("{s:s,s:s,s:s}", "at", clock_utc(now), "user", user, "assistant", assistant);
    if (!exchange) return error_set(err, ERR_USAGE, "an exchange is not UTF-8 text");
    return event_add(c, exchange, s, err);
}

int conversation_import(struct conversation *c, const json_t *exchange, struct error *err) {
    const json_t *user = json_object_get(exchange, "user"),
                 *assistant = json_object_get(exchange, "assistant"),
                 *at = json_object_get(exchange, "at");
    if (!json_is_string(user) || !json_is_string(assistant) ||
        (at && !json_is_string(at) && !json_is_null(at)))
        return error_set(err, ERR_FORMAT, "an exchange must be {\"at\", \"user\", \"assistant\"}");
    return event_add(c,
                     json_pack("{s:O?,s:O,s:O}", "at", at ? at : json_null(), "user", user,
                               "assistant", assistant),
                     NULL, err);
}

/* facts */

static bool name_is_listed(const char *names, const char *name) {
    size_t len = strlen(name);
    for (size_t n; *names; names += n + (names[n] == '|')) {
        n = strcspn(names, "|");
        if (n == len && strncasecmp(names, name, n) == 0) return true;
    }
    return false;
}

static int fact_find_kind(const char *key) {
    for (int f = 0; f < N_FACTS; f++)
        if (strcmp(key, facts[f].key) == 0 || name_is_listed(facts[f].also, key)) return f;
    return -1;
}

/* Appends a text to the list of facts unless the list has it. If the list is full, removes its
 * oldest item. */
static int fact_list_add(json_t *known, const char *key, const json_t *v, struct error *err) {
    json_t *list = json_object_get(known, key), *item;
    size_t i;
    if (!json_is_string(v))
        return json_is_null(v) ? OK : error_set(err, ERR_FORMAT, "fact '%s' must be text", key);
    if (!*json_string_value(v)) return OK;
    if (!list) json_object_set_new(known, key, list = json_array());
    json_array_foreach (list, i, item)
        if (json_equal(item, v)) return OK;
    if (json_array_size(list) == CONVERSATION_MAX_FACTS) json_array_remove(list, 0);
    json_array_append_new(list, text_to_json(json_string_value(v)));
    return OK;
}

/* Replaces the name, or adds a text or a list of texts to the other kinds of facts. */
static int fact_merge(json_t *known, enum fact f, const json_t *v, struct error *err) {
    const char *key = facts[f].key;
    size_t i;
    const json_t *member;
    int rc = OK;
    if (f == FACT_NAME) {
        if (json_is_null(v)) return OK;
        if (!json_is_string(v)) return error_set(err, ERR_FORMAT, "fact '%s' must be text", key);
        if (*json_string_value(v))
            json_object_set_new(known, key, text_to_json(json_string_value(v)));
        return OK;
    }
    if (!json_is_array(v)) return fact_list_add(known, key, v, err);
    json_array_foreach (v, i, member)
        if (rc == OK) rc = fact_list_add(known, key, member, err);
    return rc;
}

static int facts_merge(json_t *state, void *arg, struct error *err) {
    json_t *new_facts = arg, *known = json_object_get(state, "facts"), *v;
    const char *key;
    int rc = json_is_object(new_facts) ? OK : error_set(err, ERR_FORMAT, "facts must be an object");
    json_object_foreach (new_facts, key, v) {
        int f = fact_find_kind(key);
        if (rc == OK && f < 0) rc = error_set(err, ERR_FORMAT, "unknown kind of fact '%s'", key);
        if (rc == OK) rc = fact_merge(known, (enum fact)f, v, err);
    }
    return rc;
}

int conversation_merge_facts(struct conversation *c, const json_t *new_facts, struct error *err) {
    const struct change ch = {.apply = facts_merge, .arg = (void *)(uintptr_t)new_facts};
    return state_change(c, &ch, err);
}

/* True if the fact contains `text`, or if `text` is NULL. */
static bool fact_contains(const json_t *v, const char *text) {
    return !text || strcasestr(json_string_value(v), text) != NULL;
}

struct removal {
    const char *text; /* NULL: all facts */
    int n_removed;
};

static int facts_remove(json_t *state, void *arg, struct error *err) {
    struct removal *r = arg;
    json_t *known = json_object_get(state, "facts");
    (void)err;
    for (int f = 0; f < N_FACTS; f++) {
        json_t *v = json_object_get(known, facts[f].key);
        if (json_is_string(v) && fact_contains(v, r->text)) {
            r->n_removed++;
            json_object_del(known, facts[f].key);
            continue;
        }
        for (size_t i = json_array_size(v); i-- > 0;) {
            if (!fact_contains(json_array_get(v, i), r->text)) continue;
            r->n_removed++;
            json_array_remove(v, i);
        }
    }
    return OK;
}

int conversation_remove_facts(struct conversation *c, const char *text, int *n_removed,
                              struct error *err) {
    struct removal r = {.text = text};
    const struct change ch = {.apply = facts_remove, .arg = &r};
    int rc = state_change(c, &ch, err);
    *n_removed = rc == OK ? r.n_removed : 0;
    return rc;
}

/* Appends the value of a kind of fact; false when no such fact is known. */
static bool fact_append_text(const struct conversation *c, enum fact f, enum language l,
                             struct buf *out) {
    const json_t *v = json_object_get(json_object_get(c->state, "facts"), facts[f].key), *one;
    size_t i;
    if (json_is_string(v)) buf_puts(out, json_string_value(v));
    json_array_foreach (v, i, one)
        buf_printf(out, "%s%s", i ? labels[l].comma : "", json_string_value(one));
    return json_is_string(v) || json_array_size(v);
}

static const char *const fact_names[N_FACTS][N_LANGUAGES] = {
    [FACT_NAME] = {"名前", "name", "名字"},
    [FACT_INTERESTS] = {"興味", "interests", "兴趣"},
    [FACT_LIKES] = {"好きなもの", "likes", "喜欢的东西"},
    [FACT_OTHER] = {"その他の情報", "other", "其他信息"},
};

char *conversation_facts_schema(enum language l) {
    json_t *properties = json_object(), *required = json_array();
    for (int f = 0; f < N_FACTS; f++) {
        json_t *text =
            json_pack("{s:s,s:i,s:i}", "type", "string", "minLength", 1, "maxLength", SCHEMA_CHARS);
        json_t *v = f == FACT_NAME ? json_pack("{s:[o,{s:s}]}", "anyOf", text, "type", "null")
                                   : json_pack("{s:s,s:o,s:i}", "type", "array", "items", text,
                                               "maxItems", SCHEMA_ITEMS);
        json_object_set_new(properties, fact_names[f][l], v);
        json_array_append_new(required, json_string(fact_names[f][l]));
    }
    json_t *schema = json_pack("{s:s,s:o,s:o}", "type", "object", "properties", properties,
                               "required", required);
    char *text = json_canonical(schema);
    json_decref(schema);
    return text;
}

/* Appends "name: x, y" for each known fact, with `separator` between them. False if there are none.
 */
static bool facts_append_text(const struct conversation *c, enum language l, const char *separator,
                              struct buf *out) {
    bool any = false;
    for (int f = 0; f < N_FACTS; f++) {
        struct buf value = {0};
        if (fact_append_text(c, (enum fact)f, l, &value)) {
            buf_printf(out, "%s%s%s%s", any ? separator : "", fact_names[f][l], labels[l].colon,
                       value.data);
            any = true;
        }
        buf_release(&value);
    }
    return any;
}

void conversation_summary_and_facts(const struct conversation *c, enum language l,
                                    struct buf *out) {
    const char *summary = json_get_string(c->state, "summary");
    struct buf known = {0};
    if (*summary) buf_printf(out, "%s%s%s\n", labels[l].summary, labels[l].colon, summary);
    if (facts_append_text(c, l, l == LANG_EN ? "; " : "；", &known))
        buf_printf(out, "%s%s%s\n", labels[l].known, labels[l].colon, known.data);
    buf_release(&known);
}

/* Appends the summary, the facts and the exchanges from `first` on. */
static void context_append(const struct conversation *c, enum language l, size_t first,
                           struct buf *out) {
    const json_t *exchanges = json_object_get(c->state, "exchanges");
    conversation_summary_and_facts(c, l, out);
    for (size_t i = first; i < json_array_size(exchanges); i++)
        exchange_append(out, json_array_get(exchanges, i), l);
}

void conversation_context(const struct conversation *c, enum language l, int max_chars,
                          struct buf *out) {
    size_t n = json_array_size(json_object_get(c->state, "exchanges"));
    for (size_t first = 0;; first++) {
        struct buf text = {0};
        context_append(c, l, first, &text);
        size_t len =
            max_chars > 0 ? utf8_prefix_len(text.data, text.len, (size_t)max_chars) : text.len;
        bool fits = len == text.len;
        if (len && (fits || first == n)) /* summary and facts are truncated last */
            buf_add(out, text.data, len);
        buf_release(&text);
        if (fits || first == n) return;
    }
}

/* questions */

/*
 * Patterns of questions that users ask about themselves. A row matches if, anywhere in the text, an
 * alternative of `whose` is directly followed by one of `about` and that by one of `end`. An empty
 * column matches the empty string. Because the three must be adjacent, "my name is Taro. What is
 * …?" is not a question about the name. N_FACTS stands for all known facts.
 */
static const struct {
    enum language l;
    int fact;
    const char *whose, *about, *end;
} questions[] = {
#define JA_ME "私|わたし|僕|ぼく|俺|おれ|自分|あたし|うち"
#define JA_END                                                                                                                         \
    "は何|はなに|はなん|は？|は?|は覚えて|はわか|は分か|を覚えて|を知って|を教えて|を言|って何|" \
    "ってなん|、何|、なん|、覚えて|、わか|覚えて|知って|わか|分か|何|なん"
    {LANG_JA, FACT_NAME, JA_ME, "の名前", JA_END},
    {LANG_JA, FACT_NAME, JA_ME, "は誰|はだれ|って誰|ってだれ", ""},
    {LANG_JA, FACT_INTERESTS, JA_ME, "の趣味|の興味", JA_END},
    {LANG_JA, FACT_LIKES, JA_ME, "の好きなもの|の好きなこと|が好きなもの|が好きなこと", JA_END},
    {LANG_JA, FACT_LIKES, JA_ME, "は何が好き|って何が好き", ""},
    {LANG_JA, N_FACTS, JA_ME, "のこと|のことを|のことは|について", "覚えて|知って"},
#define EN_ASK "what is |what's |whats |what are |remember |do you know |tell me "
    {LANG_EN, FACT_NAME, EN_ASK, "my name", ""},
    {LANG_EN, FACT_NAME, "", "who am i", "?"},
    {LANG_EN, FACT_INTERESTS, EN_ASK, "my hobby|my hobbies|my interests", ""},
    {LANG_EN, FACT_LIKES, "", "what do i like", "?"},
    {LANG_EN, FACT_LIKES, EN_ASK, "my likes|my favorites|my favourites", ""},
    {LANG_EN, N_FACTS, "", "you remember |you know ", "about me|me?|who i am"},
    {LANG_EN, N_FACTS, "", "what do you remember about |what do you know about ", "me"},
    {LANG_ZH, FACT_NAME, "我", "的名字|的姓名|叫", "是什么|是啥|叫什么|什么|啥|吗"},
    {LANG_ZH, FACT_NAME, "", "我是谁", ""},
    {LANG_ZH, FACT_NAME, "记得|知道", "我的名字|我叫", ""},
    {LANG_ZH, FACT_INTERESTS, "我", "的爱好|的兴趣", "是什么|有哪些|是啥|吗"},
    {LANG_ZH, FACT_LIKES, "我", "喜欢", "什么|啥"},
    {LANG_ZH, N_FACTS, "记得|知道|了解", "我", "吗|的事|是谁"},
    {LANG_ZH, N_FACTS, "记得|知道", "关于我", ""},
};

/* The length of the longest of `words` ("a|b|c") that the text begins with; 0 for an empty list; -1
 * if none matches. ASCII letters match in either case. */
static int longest_word_at(const char *text, const char *words) {
    int longest = *words ? -1 : 0;
    for (size_t n; *words; words += n + (words[n] == '|')) {
        n = strcspn(words, "|");
        if (strncasecmp(text, words, n) == 0) longest = MAX(longest, (int)n);
    }
    return longest;
}

static bool question_at(const char *text, size_t row) {
    int n = longest_word_at(text, questions[row].whose);
    int k = n < 0 ? -1 : longest_word_at(text + n, questions[row].about);
    return k >= 0 && longest_word_at(text + n + k, questions[row].end) >= 0;
}

/* The first row of `questions` that matches the text, or -1. */
static int question_find(const char *text) {
    for (size_t row = 0; row < ARRAY_LEN(questions); row++)
        for (const char *pos = text; *pos; pos++)
            if (question_at(pos, row)) return (int)row;
    return -1;
}

bool conversation_answer_from_facts(const struct conversation *c, const char *question,
                                    struct buf *out) {
    static const char *const forms[N_FACTS + 1][N_LANGUAGES] = {
        [FACT_NAME] = {"あなたのお名前は%sです。", "Your name is %s.", "你的名字是%s。"},
        [FACT_INTERESTS] = {"あなたの趣味は%sです。", "Your interests are %s.", "你的兴趣是%s。"},
        [FACT_LIKES] = {"あなたの好きなものは%sです。", "You like %s.", "你喜欢%s。"},
        [FACT_OTHER] = {"", "", ""}, /* no question is about this fact only */
        [N_FACTS] = {"はい、覚えています。%s。", "Yes, I remember: %s.", "我记得：%s。"},
    };
    struct buf value = {0};
    int row = question_find(question), f = row < 0 ? -1 : questions[row].fact;
    enum language l = row < 0 ? LANG_EN : questions[row].l;
    bool known = f == N_FACTS ? facts_append_text(c, l, l == LANG_EN ? "; " : "；", &value)
                              : f >= 0 && fact_append_text(c, (enum fact)f, l, &value);
    if (known) {
        const char *form = forms[f][l], *placeholder = strstr(form, "%s");
        buf_add(out, form, (size_t)(placeholder - form));
        buf_add(out, value.data, value.len);
        buf_puts(out, placeholder + 2);
    }
    buf_release(&value);
    return known;
}
