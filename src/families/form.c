/* form: a field of a form. Common: labelled fields in any order. Rare: the same in a sentence. */
#define _GNU_SOURCE
#include "families/internal.h"

enum { NAME, AGE, TOWN, CODE, FIELDS };

static const char *const labels[3][FIELDS] = {{"name", "age", "town", "code"},
                                              {"名前", "年", "町", "番号"},
                                              {"名字", "年龄", "城市", "号码"}};

/* The values of the fields in a language. */
static void values_format(char values[FIELDS][32], int lang, const int v[FIELDS]) {
    snprintf(values[NAME], 32, "%s", family_people[lang][v[NAME]]);
    snprintf(values[AGE], 32, "%d", v[AGE]);
    snprintf(values[TOWN], 32, "%s", family_towns[lang][v[TOWN]]);
    snprintf(values[CODE], 32, "%d", v[CODE]);
}

static char *labelled_text(struct rng *r, int lang, char values[FIELDS][32]) {
    static const char *const fields[] = {"%s: %s", "%s：%s", "%s：%s"};
    static const char *const separators[] = {"; ", "、", "；"};
    uint32_t order[FIELDS] = {NAME, AGE, TOWN, CODE};
    struct buf b = {0};
    rng_shuffle(r, order, FIELDS);
    for (int i = 0; i < FIELDS; i++) {
        if (i) buf_puts(&b, separators[lang]);
        buf_printf(&b, fields[lang], labels[lang][order[i]], values[order[i]]);
    }
    return b.data;
}

static char *sentence_text(int lang, char values[FIELDS][32]) {
    static const char *const sentences[] = {"%s is %s, lives in %s and has the code %s",
                                            "%sは%sさいで、%sに住み、番号は%s",
                                            "%s%s岁，住在%s，号码是%s"};
    return xasprintf(sentences[lang], values[NAME], values[AGE], values[TOWN], values[CODE]);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const asks[] = {"%s. %s?", "%s。%sは？", "%s。%s？"};
    int lang = item_language(r), asked = rng_between(r, 0, FIELDS - 1);
    int v[FIELDS] = {[NAME] = rng_between(r, 0, FAMILY_WORDS - 1),
                     [AGE] = rng_between(r, 20, 89),
                     [TOWN] = rng_between(r, 0, FAMILY_WORDS - 1),
                     [CODE] = rng_between(r, 100, 999)};
    char values[FIELDS][32];
    values_format(values, lang, v);
    char *text = rare ? sentence_text(lang, values) : labelled_text(r, lang, values);
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], text, labels[lang][asked]);
    it->work = xstrdup("");
    it->key = xasprintf("form %d %d %d %d %d", asked, v[NAME], v[AGE], v[TOWN], v[CODE]);
    for (int i = 0; i < FIELDS; i++) item_add_choice(it, values[(asked + i) % FIELDS]);
    free(text);
}

const struct task_family form_family = {"form", false, 0.5f,
                                        "a field of a form; rare: of a sentence", generate};
