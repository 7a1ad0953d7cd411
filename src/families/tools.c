/*
 * tools: replies to a request in which tools are described as in a chat request: the right call, or
 * after a tool's result the answer. Common: one call; the answer to its result; no offered tool
 * fits. Rare: the result of a call is the argument of the next one.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_OFFERED = 4, CITY = 0, PERSON };

/* A tool with one argument, a city or a person, and one number or person as its result. */
struct tool {
    const char *names[3]; /* one of them is used: the request's description must be read */
    const char *description;
    int argument;                     /* CITY or PERSON */
    const char *result;               /* key of the result */
    int lo, hi;                       /* the result; lo < 0: a person */
    const char *asks[3], *answers[3]; /* "%s": the argument, the result */
};

enum { FRIEND = 0 };
static const struct tool tools[] = {
    {{"get_friend", "find_friend", "friend_of"},
     "the friend of a person",
     PERSON,
     "friend",
     -1,
     0,
     {"who is the friend of %s?", "%sの友はだれ？", "%s的朋友是谁？"},
     {"the friend is %s.", "友は%sです。", "朋友是%s。"}},
    {{"get_age", "find_age", "age_of"},
     "the age of a person",
     PERSON,
     "age",
     20,
     89,
     {"how old is %s?", "%sは何さい？", "%s几岁？"},
     {"%s years old.", "%sさいです。", "%s岁。"}},
    {{"get_room", "find_room", "room_of"},
     "the room of a person",
     PERSON,
     "room",
     100,
     399,
     {"in which room is %s?", "%sはどの部屋？", "%s在哪个房间？"},
     {"in room %s.", "%s号室です。", "在%s号房间。"}},
    {{"get_phone", "find_phone", "phone_of"},
     "the telephone number of a person",
     PERSON,
     "phone",
     1000,
     9999,
     {"what is the number of %s?", "%sの電話番号は？", "%s的电话号码？"},
     {"the number is %s.", "番号は%sです。", "号码是%s。"}},
    {{"get_temperature", "read_temperature", "temperature_in"},
     "the temperature in a city",
     CITY,
     "degrees",
     1,
     35,
     {"how warm is it in %s?", "%sの気温は？", "%s的气温？"},
     {"%s degrees.", "%s度です。", "%s度。"}},
    {{"get_population", "read_population", "population_of"},
     "the population of a city",
     CITY,
     "people",
     1000,
     9999,
     {"how many people live in %s?", "%sの人口は？", "%s的人口？"},
     {"%s people.", "%s人です。", "%s人。"}},
    {{"get_distance", "read_distance", "distance_to"},
     "the distance to a city",
     CITY,
     "km",
     100,
     999,
     {"how far is %s?", "%sまで何キロ？", "到%s多远？"},
     {"%s km away.", "%sキロです。", "%s公里。"}},
    {{"get_mayor", "find_mayor", "mayor_of"},
     "the mayor of a city",
     CITY,
     "mayor",
     -1,
     0,
     {"who is the mayor of %s?", "%sの市長はだれ？", "%s的市长是谁？"},
     {"the mayor is %s.", "市長は%sです。", "市长是%s。"}},
};
/* Questions about a friend or a mayor's property, which need two calls. */
static const char *const friend_of[] = {"the friend of %s", "%sの友", "%s的朋友"};
static const char *const mayor_of[] = {"the mayor of %s", "%sの市長", "%s市长"};
static const char *const none_fits[] = {"no tool fits.", "合う道具がありません。",
                                        "没有合适的工具。"};

struct offer {
    int n, tool[MAX_OFFERED], name[MAX_OFFERED];
};

static int find_tool(const char *result) {
    int i = 0;
    while (strcmp(tools[i].result, result) != 0) i++;
    return i;
}

/* Offers tools[first] and others, without `excluded`, in random order. */
static struct offer offer_sample(struct rng *r, int first, int second, int excluded) {
    struct offer o = {.n = 0};
    uint32_t order[ARRAY_LEN(tools)];
    int n = rng_between(r, 2, MAX_OFFERED);
    for (uint32_t i = 0; i < ARRAY_LEN(tools); i++) order[i] = i;
    rng_shuffle(r, order, ARRAY_LEN(tools));
    if (first >= 0) o.tool[o.n++] = first;
    if (second >= 0) o.tool[o.n++] = second;
    for (size_t i = 0; i < ARRAY_LEN(tools) && o.n < n; i++)
        if ((int)order[i] != first && (int)order[i] != second && (int)order[i] != excluded)
            o.tool[o.n++] = (int)order[i];
    for (int i = o.n - 1; i > 0; i--) {
        int k = rng_between(r, 0, i), swap = o.tool[i];
        o.tool[i] = o.tool[k];
        o.tool[k] = swap;
    }
    for (int i = 0; i < o.n; i++) o.name[i] = rng_between(r, 0, 2);
    return o;
}

static const char *offered_name(const struct offer *o, int tool) {
    int i = 0;
    while (i < o->n && o->tool[i] != tool) i++;
    return tools[tool].names[i < o->n ? o->name[i] : 0];
}

static const char *argument_name(int tool) {
    return tools[tool].argument == CITY ? "city" : "name";
}

static json_t *tools_json(const struct offer *o) {
    json_t *list = json_array();
    for (int i = 0; i < o->n; i++) {
        const char *arg = argument_name(o->tool[i]);
        json_array_append_new(
            list, json_pack("{s:s,s:{s:s,s:s,s:{s:s,s:{s:{s:s}},s:[s]}}}", "type", "function",
                            "function", "name", tools[o->tool[i]].names[o->name[i]], "description",
                            tools[o->tool[i]].description, "parameters", "type", "object",
                            "properties", arg, "type", "string", "required", arg));
    }
    return list;
}

static json_t *arguments_json(int tool, const char *argument) {
    return json_pack("{s:s}", argument_name(tool), argument);
}

/* A call as chat templates write it. */
static char *call_text(const struct offer *o, int tool, const char *argument) {
    json_t *v = json_pack("{s:s,s:o}", "name", offered_name(o, tool), "arguments",
                          arguments_json(tool, argument));
    char *object = json_dumps(v, 0), *text = xasprintf("<tool_call>\n%s\n</tool_call>", object);
    free(object);
    json_decref(v);
    return text;
}

/* Appends the assistant's call and the tool's result. */
static void call_add(json_t *messages, const struct offer *o, int tool, const char *argument,
                     const char *result) {
    json_t *value = tools[tool].lo < 0 ? json_string(result) : json_integer(atoi(result)),
           *object = json_pack("{s:o}", tools[tool].result, value);
    char *text = json_dumps(object, 0);
    json_array_append_new(messages, json_pack("{s:s,s:s,s:[{s:s,s:{s:s,s:o}}]}", "role",
                                              "assistant", "content", "", "tool_calls", "type",
                                              "function", "function", "name", offered_name(o, tool),
                                              "arguments", arguments_json(tool, argument)));
    messages_add(messages, "tool", text);
    json_decref(object);
    free(text);
}

static char *result_sample(struct rng *r, int tool, int lang) {
    const struct tool *t = &tools[tool];
    return t->lo < 0 ? xstrdup(family_people[lang][rng_between(r, 0, FAMILY_WORDS - 1)])
                     : xasprintf("%d", rng_between(r, t->lo, t->hi));
}

static void add_owned(struct task_item *it, char *choice) {
    item_add_choice(it, choice);
    free(choice);
}

/* Adds wrong calls: another argument, another tool, both. */
static void add_wrong_calls(struct rng *r, struct task_item *it, int lang, const struct offer *o,
                            int tool, const char *const *arguments, const char *argument) {
    item_add_choice(it, none_fits[lang]);
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        int other = o->tool[rng_between(r, 0, o->n - 1)];
        const char *value =
            rng_between(r, 0, 1) ? argument : arguments[rng_between(r, 0, FAMILY_WORDS - 1)];
        add_owned(it, call_text(o, rng_between(r, 0, 1) ? tool : other, value));
    }
}

static void add_wrong_answers(struct rng *r, struct task_item *it, int tool, int lang,
                              const char *argument, const char *result) {
    add_owned(it, xasprintf(tools[tool].answers[lang], argument));
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        int other = rng_between(r, 0, (int)ARRAY_LEN(tools) - 1);
        char *value = result_sample(r, tool, lang);
        add_owned(it, rng_between(r, 0, 1) ? xasprintf(tools[tool].answers[lang], value)
                                           : xasprintf(tools[other].answers[lang], result));
        free(value);
    }
}

/* Sets the item's conversation. Takes ownership of the question and the messages. */
static void chat_set(struct task_item *it, char *question, json_t *messages,
                     const struct offer *o) {
    it->question = question;
    it->work = xstrdup("");
    it->whole_replies = true;
    it->chat = json_pack("{s:o,s:o}", "messages", messages, "tools", tools_json(o));
}

/* One call, its result, or no tool that fits. */
static void generate_common(struct rng *r, struct task_item *it, int lang) {
    enum { CALL, ANSWER, NONE };
    int tool = rng_between(r, 0, (int)ARRAY_LEN(tools) - 1), word = rng_between(r, 0, 7),
        u = rng_between(r, 0, 9),
        step = u < 5   ? CALL
               : u < 9 ? ANSWER
                       : NONE;
    struct offer o = offer_sample(r, step == NONE ? -1 : tool, -1, tool);
    const char *const *arguments =
        tools[tool].argument == CITY ? family_towns[lang] : family_people[lang];
    char *ask = xasprintf(tools[tool].asks[lang], arguments[word]),
         *result = result_sample(r, tool, lang);
    json_t *messages = json_array();
    messages_add(messages, "user", ask);
    it->key = xasprintf("tools %d %d", tool, word);
    if (step == CALL) {
        add_owned(it, call_text(&o, tool, arguments[word]));
        add_wrong_calls(r, it, lang, &o, tool, arguments, arguments[word]);
    } else if (step == ANSWER) {
        call_add(messages, &o, tool, arguments[word], result);
        add_owned(it, xasprintf(tools[tool].answers[lang], result));
        add_wrong_answers(r, it, tool, lang, arguments[word], result);
    } else {
        item_add_choice(it, none_fits[lang]);
        add_wrong_calls(r, it, lang, &o, o.tool[0], arguments, arguments[word]);
    }
    chat_set(it, ask, messages, &o);
    free(result);
}

/* A property of a person's friend, or of a city's mayor: the first call, or the second one after
 * the first one's result. */
static void generate_chain(struct rng *r, struct task_item *it, int lang) {
    bool mayor = rng_between(r, 0, 1), second = rng_between(r, 0, 3) > 0;
    int first = mayor ? find_tool("mayor") : FRIEND, word = rng_between(r, 0, 7),
        then = 1 + rng_between(r, 0, 2); /* age, room or phone */
    struct offer o = offer_sample(r, first, then, -1);
    const char *const *arguments = mayor ? family_towns[lang] : family_people[lang],
                      *person = family_people[lang][rng_between(r, 0, 7)];
    char *who = xasprintf((mayor ? mayor_of : friend_of)[lang], arguments[word]),
         *ask = xasprintf(tools[then].asks[lang], who);
    json_t *messages = json_array();
    messages_add(messages, "user", ask);
    it->key = xasprintf("tools chain %d %d %d", mayor, word, then);
    if (second) {
        call_add(messages, &o, first, arguments[word], person);
        add_owned(it, call_text(&o, then, person));
        add_owned(it, xasprintf(tools[first].answers[lang], person));
        add_owned(it, call_text(&o, then, arguments[word]));
        add_wrong_calls(r, it, lang, &o, then, family_people[lang], person);
    } else {
        add_owned(it, call_text(&o, first, arguments[word]));
        add_owned(it, call_text(&o, then, arguments[word]));
        add_wrong_calls(r, it, lang, &o, then, arguments, arguments[word]);
    }
    chat_set(it, ask, messages, &o);
    free(who);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    int lang = item_language(r);
    it->lang = family_languages[lang];
    if (rare)
        generate_chain(r, it, lang);
    else
        generate_common(r, it, lang);
}

const struct task_family tools_family = {"tools",
                                         false,
                                         0.5f,
                                         "calls of offered tools; rare: chains of two",
                                         generate,
                                         .conversations = true,
                                         .max_tokens = 768};
