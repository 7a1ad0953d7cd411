/* voice: which of the three personas says a sentence. */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>
#include <string.h>

static const char *const nouns[] = {"plan", "rule",  "proof", "claim", "idea",  "route", "answer",
                                    "sum",  "map",   "list",  "tool",  "story", "guess", "method",
                                    "word", "model", "test",  "path",  "count", "note"};
static const char *const traits[] = {"short", "long",  "old",   "new",  "odd",   "plain", "first",
                                     "last",  "small", "large", "warm", "cold",  "loud",  "quiet",
                                     "green", "blue",  "round", "flat", "sharp", "slow"};
static const char *const voices[3][6] = {
    {"i doubt the %s %s", "i test the %s %s", "where is the flaw in the %s %s",
     "the %s %s is not shown yet", "I check each step of the %s %s", "is the %s %s true"},
    {"i use the %s %s today", "does the %s %s work in practice", "let us build the %s %s",
     "the %s %s must be cheap", "i try the %s %s by hand", "how do we ship the %s %s"},
    {"what if the %s %s turns around", "i wonder about the %s %s", "let us look beyond the %s %s",
     "the %s %s may hide a new way", "i mix the %s %s with another",
     "imagine the %s %s upside down"},
};
static const char *const voice_names[] = {"critic", "practitioner", "explorer"};

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"who says: %s, in the %s %s?", "だれの言葉：%s（%s %s）",
                                       "谁说的：%s（%s %s）"};
    int persona = rng_between(r, 0, 2), phrase = rng_between(r, 0, 5), lang = item_language(r);
    int t = rng_between(r, 0, 19), n = rng_between(r, 0, 19), t2 = rng_between(r, 0, 19),
        n2 = rng_between(r, 0, 19);
    char *sentence = NULL;
    const char *fmt = voices[persona][phrase];
    const char *placeholder = strstr(fmt, "%s %s");
    sentence = xasprintf("%.*s%s %s%s", (int)(placeholder - fmt), fmt, traits[t], nouns[n],
                         placeholder + 5);
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], sentence, traits[t2], nouns[n2]);
    it->work = xstrdup("");
    it->key = xasprintf("voice %d %d %d %d %d %d", persona, phrase, t, n, t2, n2);
    item_add_choice(it, voice_names[persona]);
    for (int i = 0; i < 3; i++) item_add_choice(it, voice_names[i]);
    free(sentence);
}

const struct task_family voice_family = {"voice", true, 0, "which persona says a sentence",
                                         generate};
