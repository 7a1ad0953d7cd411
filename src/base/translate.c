/*
 * translate: messages and help texts in the user's language, with gettext.
 *
 * The language is that of LANGUAGE, LC_ALL, LC_MESSAGES or LANG, as gettext documents them; there
 * are catalogues for Japanese and simplified Chinese (po/). The locale of the process is C.UTF-8
 * with LANGUAGE, because gettext needs a locale that exists, and a machine may have no other one.
 * Only LC_MESSAGES is set: numbers keep their points.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <libintl.h>
#include <locale.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char domain[] = "shoal";
static atomic_bool is_open;
static _Thread_local bool is_suspended;

/* Whether `list`, such as "ja_JP.UTF-8" or "zh_CN:en", begins with a language. */
static bool begins_with(const char *list, const char *language) {
    size_t n = strlen(language);
    return strncmp(list, language, n) == 0 && (!list[n] || strchr("_.@:", list[n]));
}

/* The catalogue for the environment; NULL: English. Traditional Chinese has none. */
static const char *catalogue_find(void) {
    static const char *const names[] = {"LC_ALL", "LC_MESSAGES", "LANG"};
    const char *locale = NULL, *list = getenv("LANGUAGE");
    for (size_t i = 0; i < ARRAY_LEN(names) && !(locale && *locale); i++) locale = getenv(names[i]);
    if (!locale || !*locale || begins_with(locale, "C") || begins_with(locale, "POSIX"))
        return NULL;
    if (!list || !*list) list = locale;
    if (begins_with(list, "ja")) return "ja";
    if (begins_with(list, "zh_CN") || begins_with(list, "zh_SG") ||
        (begins_with(list, "zh") && list[2] != '_'))
        return "zh_CN";
    return NULL;
}

void translations_open(const char *dir) {
    const char *catalogue = catalogue_find();
    if (!catalogue || !setlocale(LC_MESSAGES, "C.UTF-8")) return;
    CHECK(setenv("LANGUAGE", catalogue, 1) == 0);
    is_open = bindtextdomain(domain, dir) && bind_textdomain_codeset(domain, "UTF-8");
}

void translations_close(void) {
    is_open = false;
}

const char *translate(const char *text) {
    return is_open && !is_suspended && *text ? dgettext(domain, text) : text;
}

bool translations_suspend(bool suspend) {
    bool before = is_suspended;
    is_suspended = suspend;
    return before;
}
