/*
 * residents: questions that a model cannot answer without tools: arithmetic with long numbers, and
 * facts of a table of invented people and towns, which a knowledge base holds.
 *
 * Kinds: `arithmetic` needs one call of the calculator; `lookup` one search; `chain` two searches,
 * the second one for a name that the first one found; `sum` two searches and the calculator;
 * `direct` no tool: these are questions of the easy families. Each question comes with its calls,
 * so that conversations for training can be made of them.
 *
 * Every name and every arithmetic question belongs to one split. So a model that has learned from
 * the train split has seen neither the people and towns of the test split nor its numbers.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>
#include <string.h>

enum { N_PEOPLE = 80, N_TOWNS = 20, MAX_NAME = 32 };
enum subject { PERSON, TOWN };
enum property { AGE, ROOM, PHONE, HOME, FRIEND, POPULATION, DISTANCE, MAYOR, N_PROPERTIES };

struct person {
    char name[MAX_NAME];
    int age, room, phone, town, friend; /* town, friend: indices in the table */
};
struct town {
    char name[MAX_NAME];
    int population, distance, mayor; /* mayor: index of a person */
};
struct table { /* people and towns with names in one language */
    struct person people[N_PEOPLE];
    struct town towns[N_TOWNS];
};
struct residents {
    enum data_split split;
    struct rng r;
    struct table tables[3];
};

/* words; "%s" is a name */

/* Between and after the parts of a document: its name, then label and value of each property. */
static const char *const separators[] = {". ", "。", "。"}, *const ends[] = {".", "。", "。"};
enum { WORDINGS = 2 };
static const struct {
    enum subject of;
    const char *asks[3][WORDINGS], *labels[3]; /* labels: in the documents */
} properties[N_PROPERTIES] = {
    [AGE] = {PERSON,
             {{"how old is %s?", "what is the age of %s?"},
              {"%sは何さい？", "%sの年は？"},
              {"%s几岁？", "%s的年龄？"}},
             {"age: ", "年：", "年龄："}},
    [ROOM] = {PERSON,
              {{"in which room is %s?", "which room has %s?"},
               {"%sはどの部屋？", "%sの部屋は？"},
               {"%s在哪个房间？", "%s的房间号？"}},
              {"room: ", "部屋：", "房间："}},
    [PHONE] = {PERSON,
               {{"what is the number of %s?", "how can i call %s?"},
                {"%sの電話番号は？", "%sに電話するには？"},
                {"%s的电话号码？", "怎么打电话给%s？"}},
               {"phone: ", "電話：", "电话："}},
    [HOME] = {PERSON,
              {{"where does %s live?", "which town is the home of %s?"},
               {"%sはどこに住んでいる？", "%sの町は？"},
               {"%s住在哪里？", "%s的城市？"}},
              {"town: ", "町：", "城市："}},
    [FRIEND] = {PERSON,
                {{"who is the friend of %s?", "name the friend of %s."},
                 {"%sの友はだれ？", "%sの友の名前は？"},
                 {"%s的朋友是谁？", "%s的朋友叫什么？"}},
                {"friend: ", "友：", "朋友："}},
    [POPULATION] = {TOWN,
                    {{"how many people live in %s?", "what is the population of %s?"},
                     {"%sの人口は？", "%sには何人いる？"},
                     {"%s的人口？", "%s有多少人？"}},
                    {"people: ", "人口：", "人口："}},
    [DISTANCE] = {TOWN,
                  {{"how far is %s?", "what is the distance to %s?"},
                   {"%sまで何キロ？", "%sの距離は？"},
                   {"到%s多远？", "%s的距离？"}},
                  {"distance: ", "距離：", "距离："}},
    [MAYOR] = {TOWN,
               {{"who is the mayor of %s?", "name the mayor of %s."},
                {"%sの市長はだれ？", "%sの市長の名前は？"},
                {"%s的市长是谁？", "%s的市长叫什么？"}},
               {"mayor: ", "市長：", "市长："}},
};
/* The subject of a chain's second search: of a person the friend or the town, of a town the mayor.
 */
static const struct {
    enum property first;
    const char *who[3];
} links[] = {
    {FRIEND, {"the friend of %s", "%sの友", "%s的朋友"}},
    {HOME, {"the town of %s", "%sの町", "%s的城市"}},
    {MAYOR, {"the mayor of %s", "%sの市長", "%s的市长"}},
};
static const char *const sum_asks[3][WORDINGS] = {
    {"how many people live in %s and %s together?", "people of %s plus people of %s?"},
    {"%sと%sの人口を合わせると？", "%sの人口と%sの人口の合計は？"},
    {"%s和%s一共有多少人？", "%s的人口加%s的人口？"}};
static const char signs[] = "+-*";
static const char *const sign_words[3][3] = {
    {" plus ", " minus ", " times "}, {"たす", "ひく", "かける"}, {"加", "减", "乘"}};
static const char *const arithmetic_asks[3][3] = {
    {"%s = ?", "what is %s?", "compute %s"},
    {"%s = ?", "%sはいくつ？", "%sを計算して"},
    {"%s = ?", "%s等于多少？", "计算%s"},
};

/* names */

/* Appends one of the characters of a text; all have three bytes. */
static void add_character(char *name, const char *characters, struct rng *r) {
    uint32_t i = rng_below(r, (uint32_t)(strlen(characters) / 3));
    strncat(name, characters + (size_t)3 * i, 3);
}

static void name_sample(struct rng *r, int lang, enum subject of, char *out) {
    static const char consonants[] = "bdfgklmnprstvz", vowels[] = "aeiou",
                      kana[] = "アイウエカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメ"
                               "モヤユヨラリルレロワ",
                      surnames[] = "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗",
                      given[] = "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超秀霞平刚桂英华玉兰红文辉力",
                      places[] = "云石青白金银东南西北长永安平新大海江",
                      kinds[] = "州城川山阳宁门港源谷";
    int n = 0;
    *out = 0;
    if (lang == EN) {
        for (int syllables = rng_between(r, 2, 3); syllables > 0; syllables--) {
            out[n++] = consonants[rng_below(r, sizeof consonants - 1)];
            out[n++] = vowels[rng_below(r, sizeof vowels - 1)];
        }
        if (of == TOWN) out[n++] = consonants[rng_below(r, sizeof consonants - 1)];
        out[n] = 0;
    } else if (lang == JA) {
        for (int i = 0; i < 3; i++) add_character(out, kana, r);
    } else {
        add_character(out, of == PERSON ? surnames : places, r);
        add_character(out, of == PERSON ? given : places, r);
        add_character(out, of == PERSON ? given : kinds, r);
    }
}

static bool name_exists(const struct table *t, const char *name) {
    for (int i = 0; i < N_PEOPLE; i++)
        if (strcmp(t->people[i].name, name) == 0) return true;
    for (int i = 0; i < N_TOWNS; i++)
        if (strcmp(t->towns[i].name, name) == 0) return true;
    return false;
}

static void name_new(struct residents *v, int lang, enum subject of, char *out) {
    char name[MAX_NAME], key[MAX_NAME + 16];
    do {
        name_sample(&v->r, lang, of, name);
        snprintf(key, sizeof key, "resident %s", name);
    } while (family_split_of(key) != v->split || name_exists(&v->tables[lang], name));
    memcpy(out, name, sizeof name);
}

static void table_fill(struct residents *v, int lang) {
    struct table *t = &v->tables[lang];
    struct rng *r = &v->r;
    for (int i = 0; i < N_PEOPLE; i++) name_new(v, lang, PERSON, t->people[i].name);
    for (int i = 0; i < N_TOWNS; i++) name_new(v, lang, TOWN, t->towns[i].name);
    for (int i = 0; i < N_PEOPLE; i++) {
        struct person *p = &t->people[i];
        p->age = rng_between(r, 20, 89);
        p->room = rng_between(r, 100, 399);
        p->phone = rng_between(r, 1000, 9999);
        p->town = rng_between(r, 0, N_TOWNS - 1);
        p->friend = (i + rng_between(r, 1, N_PEOPLE - 1)) % N_PEOPLE;
    }
    for (int i = 0; i < N_TOWNS; i++) {
        t->towns[i].population = rng_between(r, 1000, 99999);
        t->towns[i].distance = rng_between(r, 100, 999);
        t->towns[i].mayor = rng_between(r, 0, N_PEOPLE - 1);
    }
}

/* facts */

static const char *subject_name(const struct table *t, enum subject of, int i) {
    return of == PERSON ? t->people[i].name : t->towns[i].name;
}

/* The value of a property of person or town i; *next receives the index of the person or town that
 * it names. malloc'ed. */
static char *property_value(const struct table *t, enum property property, int i, int *next) {
    const struct person *p = &t->people[i];
    const struct town *w = &t->towns[i % N_TOWNS];
    const int numbers[N_PROPERTIES] = {[AGE] = p->age,
                                       [ROOM] = p->room,
                                       [PHONE] = p->phone,
                                       [POPULATION] = w->population,
                                       [DISTANCE] = w->distance};
    *next = property == HOME ? p->town : property == FRIEND ? p->friend : w->mayor;
    if (property == HOME) return xstrdup(t->towns[*next].name);
    if (property == FRIEND || property == MAYOR) return xstrdup(t->people[*next].name);
    return xasprintf("%d", numbers[property]);
}

/* The document of person or town i: its name, and its properties with their labels. */
static json_t *document(const struct table *t, int lang, enum subject of, int i) {
    const char *name = subject_name(t, of, i);
    struct buf text = {0};
    buf_puts(&text, name);
    for (int k = of == PERSON ? AGE : POPULATION; k <= (of == PERSON ? FRIEND : MAYOR); k++) {
        int next;
        char *value = property_value(t, (enum property)k, i, &next);
        buf_printf(&text, "%s%s%s", separators[lang], properties[k].labels[lang], value);
        free(value);
    }
    buf_puts(&text, ends[lang]);
    json_t *v = json_pack("{s:s,s:s}", "title", name, "content", text.data);
    buf_release(&text);
    return v;
}

/* questions */

/* A question in the making. */
struct question {
    const char *kind;
    char *text, *answer; /* malloc'ed */
    const char *quoted; /* label before the answer in a document, which the reply quotes; or NULL */
    json_t *calls;
};

static void add_call(struct question *q, const char *tool, const char *argument,
                     const char *value) {
    json_array_append_new(q->calls,
                          json_pack("{s:s,s:{s:s}}", "name", tool, "arguments", argument, value));
}

static void add_search(struct question *q, const char *name) {
    add_call(q, "knowledge", "query", name);
}

static void add_calculation(struct question *q, const char *expression) {
    add_call(q, "calculator", "expression", expression);
}

/* A property of subject `of`. */
static enum property property_sample(struct rng *r, enum subject of) {
    return of == PERSON ? (enum property)rng_between(r, AGE, FRIEND)
                        : (enum property)rng_between(r, POPULATION, MAYOR);
}

static int subject_sample(struct rng *r, enum subject of) {
    return rng_between(r, 0, (of == PERSON ? N_PEOPLE : N_TOWNS) - 1);
}

static char *property_question(struct rng *r, int lang, enum property property, const char *name) {
    return xasprintf(properties[property].asks[lang][rng_between(r, 0, WORDINGS - 1)], name);
}

static void make_lookup(struct residents *v, int lang, struct question *q) {
    const struct table *t = &v->tables[lang];
    enum subject of = rng_between(&v->r, 0, 2) ? PERSON : TOWN;
    enum property property = property_sample(&v->r, of);
    int i = subject_sample(&v->r, of), next;
    q->kind = "lookup";
    q->text = property_question(&v->r, lang, property, subject_name(t, of, i));
    q->answer = property_value(t, property, i, &next);
    q->quoted = properties[property].labels[lang];
    add_search(q, subject_name(t, of, i));
}

static void make_chain(struct residents *v, int lang, struct question *q) {
    const struct table *t = &v->tables[lang];
    int k = rng_between(&v->r, 0, (int)ARRAY_LEN(links) - 1), next, last;
    enum property first = links[k].first;
    enum subject of = properties[first].of, then = first == HOME ? TOWN : PERSON;
    enum property second = property_sample(&v->r, then);
    int i = subject_sample(&v->r, of);
    char *found = property_value(t, first, i, &next),
         *who = xasprintf(links[k].who[lang], subject_name(t, of, i));
    q->kind = "chain";
    q->text = property_question(&v->r, lang, second, who);
    q->answer = property_value(t, second, next, &last);
    q->quoted = properties[second].labels[lang];
    add_search(q, subject_name(t, of, i));
    add_search(q, found);
    free(found);
    free(who);
}

static void make_sum(struct residents *v, int lang, struct question *q) {
    const struct table *t = &v->tables[lang];
    int a = subject_sample(&v->r, TOWN), b = (a + rng_between(&v->r, 1, N_TOWNS - 1)) % N_TOWNS;
    const struct town *x = &t->towns[a], *y = &t->towns[b];
    char *expression = xasprintf("%d + %d", x->population, y->population);
    q->kind = "sum";
    q->text = xasprintf(sum_asks[lang][rng_between(&v->r, 0, WORDINGS - 1)], x->name, y->name);
    q->answer = xasprintf("%d", x->population + y->population);
    add_search(q, x->name);
    add_search(q, y->name);
    add_calculation(q, expression);
    free(expression);
}

/* A number of three to six digits. */
static int long_number(struct rng *r) {
    static const int powers[] = {100, 1000, 10000, 100000};
    int p = powers[rng_between(r, 0, 3)];
    return rng_between(r, p, 10 * p - 1);
}

/* "3 + 4 * 5" with words instead of signs: "3 plus 4 times 5". */
static char *expression_in_words(const char *expression, int lang) {
    struct buf text = {0};
    for (const char *at = expression; *at; at++) {
        const char *sign = strchr(signs, *at);
        if (sign)
            buf_puts(&text, sign_words[lang][sign - signs]);
        else if (*at != ' ')
            buf_add(&text, at, 1);
    }
    return text.data;
}

static void make_arithmetic(struct residents *v, int lang, struct question *q) {
    struct rng *r = &v->r;
    char *expression = NULL, *key = NULL, *words = NULL;
    int64_t value;
    do {
        int a = long_number(r), b = long_number(r), c = long_number(r);
        char first = signs[rng_between(r, 0, 2)], second = signs[rng_between(r, 0, 1)];
        bool three = rng_between(r, 0, 1);
        free(expression);
        free(key);
        value = first == '+' ? (int64_t)a + b : first == '-' ? (int64_t)a - b : (int64_t)a * b;
        if (three) value += second == '+' ? c : -c;
        expression = three ? xasprintf("%d %c %d %c %d", a, first, b, second, c)
                           : xasprintf("%d %c %d", a, first, b);
        key = xasprintf("residents %s", expression);
    } while (family_split_of(key) != v->split);
    q->kind = "arithmetic";
    if (rng_between(r, 0, 1)) words = expression_in_words(expression, lang);
    q->text = xasprintf(arithmetic_asks[lang][rng_between(r, 0, 2)], words ? words : expression);
    q->answer = xasprintf("%lld", (long long)value);
    add_calculation(q, expression);
    free(expression);
    free(key);
    free(words);
}

/* Question `index` of an easy family. */
static void make_direct(struct residents *v, uint64_t seed, uint32_t index, struct question *q) {
    struct task_item it;
    int family;
    do family = rng_between(&v->r, 0, fry_count() - 1);
    while (!task_families[family]->easy);
    family_item(family, v->split, seed, index, false, &it);
    q->kind = "direct";
    q->text = xstrdup(it.question);
    q->answer = xstrdup(it.choices[it.correct]);
    task_item_release(&it);
}

static json_t *question_json(struct residents *v, uint64_t seed, int index) {
    struct question q = {.calls = json_array()};
    int lang = item_language(&v->r), share = rng_between(&v->r, 0, 19);
    if (share < 3)
        make_arithmetic(v, lang, &q);
    else if (share < 9)
        make_lookup(v, lang, &q);
    else if (share < 16)
        make_chain(v, lang, &q);
    else if (share < 18)
        make_sum(v, lang, &q);
    else
        make_direct(v, seed, (uint32_t)index, &q);
    char *reply = q.quoted ? xasprintf(WORK_PREFIX " %s%s\n" ANSWER_PREFIX " %s", q.quoted,
                                       q.answer, q.answer)
                           : xasprintf(ANSWER_PREFIX " %s", q.answer);
    json_t *line = json_pack("{s:s,s:s,s:s,s:s,s:o}", "kind", q.kind, "question", q.text, "answer",
                             q.answer, "reply", reply, "calls", q.calls);
    free(q.text);
    free(q.answer);
    free(reply);
    return line;
}

/* files */

static void add_documents(const struct residents *v, struct buf *text) {
    for (int lang = EN; lang <= ZH; lang++) {
        const struct table *t = &v->tables[lang];
        for (int i = 0; i < N_PEOPLE; i++) buf_add_json_line(text, document(t, lang, PERSON, i));
        for (int i = 0; i < N_TOWNS; i++) buf_add_json_line(text, document(t, lang, TOWN, i));
    }
}

static int write_to(const char *dir, const char *name, const struct buf *text, struct error *err) {
    char *path = xasprintf("%s/%s", dir, name);
    int rc = file_write(path, text->data, text->len, err);
    free(path);
    return rc;
}

int residents_write(enum data_split split, int n, uint64_t seed, const char *dir,
                    struct error *err) {
    struct residents *v = xcalloc(1, sizeof *v);
    struct buf documents = {0}, questions = {0};
    v->split = split;
    v->r = rng_make(seed, RNG_TASK, MAX_FAMILIES + 2, (uint32_t)split);
    for (int lang = EN; lang <= ZH; lang++) table_fill(v, lang);
    add_documents(v, &documents);
    for (int i = 0; i < n; i++) buf_add_json_line(&questions, question_json(v, seed, i));
    free(v);
    int rc = dir_make(dir, err);
    if (rc == OK) rc = write_to(dir, "documents.jsonl", &documents, err);
    if (rc == OK) rc = write_to(dir, "questions.jsonl", &questions, err);
    buf_release(&documents);
    buf_release(&questions);
    return rc;
}
