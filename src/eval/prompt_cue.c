/*
 * prompt_cue: completes prompts that a question file has written out, as files of llm-foundry do.
 *
 * A cue is the label at the end of a prompt that asks for the answer: "Answer:", "A:", 答え：. Some
 * files have it in every line, others leave it to their configuration. A prompt with a cue stays as
 * it is; a prompt without one gets the cue of its own notation.
 */
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

size_t text_trimmed_len(const char *s) {
    size_t n = strlen(s), prev_n;
    do {
        prev_n = n;
        while (n > 0 && strchr(" \t\r\n\v\f", s[n - 1])) n--;
        if (n >= 3 && memcmp(s + n - 3, "\u3000", 3) == 0) n -= 3;
    } while (n < prev_n);
    return n;
}

char *text_trimmed(const char *s) {
    for (size_t from; (from = strspn(s, " \t\r\n\v\f")) > 0 || strncmp(s, "\u3000", 3) == 0;)
        s += from ? from : 3;
    return xasprintf("%.*s", (int)MIN(text_trimmed_len(s), (size_t)INT32_MAX), s);
}

/* Whether the text s[n] ends with `word` as a whole word; a word that is not ASCII has no blank
 * before it. */
static bool ends_with_word(const char *s, size_t n, const char *word) {
    size_t len = strlen(word);
    if (n < len || memcmp(s + n - len, word, len) != 0) return false;
    return n == len || (*word & 0x80) || strchr(" \t\n\"'([*", s[n - len - 1]);
}

/* Whether the line s[n] is a label: one to three words. */
static bool is_label(const char *s, size_t n) {
    int words = 0;
    for (size_t i = 0; i < n; i++) {
        if (strchr(".?!:;,$", s[i])) return false;
        words += s[i] != ' ' && (i == 0 || s[i - 1] == ' ');
    }
    return words >= 1 && words <= 3;
}

/* Whether the text ends with a cue: the last line is a label with a colon, but not the only line,
 * or it ends with a word for an answer and a colon. */
static bool ends_with_cue(const char *s) {
    static const char *const words[] = {"Answer", "answer", "ANSWER", "A",    "答え",
                                        "答",     "回答",   "解答",   "答案", "正解"};
    size_t n = text_trimmed_len(s), line;
    if (n >= 1 && s[n - 1] == ':')
        n--;
    else if (n >= 3 && memcmp(s + n - 3, "：", 3) == 0)
        n -= 3;
    else
        return false;
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (ends_with_word(s, n, words[i])) return true;
    for (line = n; line > 0 && s[line - 1] != '\n';) line--;
    return line > 0 && is_label(s + line, n - line);
}

static bool has_line_with(const char *s, const char *prefix) {
    for (; s; s = strchr(s, '\n'), s = s ? s + 1 : NULL)
        if (strncmp(s, prefix, strlen(prefix)) == 0) return true;
    return false;
}

char *prompt_of_query(const char *query) {
    bool lacks_cue = has_line_with(query, "Question:") && !ends_with_cue(query);
    return xasprintf("%.*s%s", (int)MIN(text_trimmed_len(query), (size_t)INT32_MAX), query,
                     lacks_cue ? "\nAnswer:" : "");
}

char *prompt_of_question(const char *question) {
    static const char *const notations[][2] = {
        {"Question:", "\nAnswer:"}, {"Q:", "\nA:"},         {"質問:", "\n回答:"},
        {"質問：", "\n回答："},     {"問題:", "\n答え:"},   {"問題：", "\n答え："},
        {"问题:", "\n答案:"},       {"问题：", "\n答案："},
    };
    int n = (int)MIN(text_trimmed_len(question), (size_t)INT32_MAX);
    if (ends_with_cue(question)) return xasprintf("%.*s", n, question);
    for (size_t i = 0; i < ARRAY_LEN(notations); i++) {
        if (!has_line_with(question, notations[i][0])) continue;
        char *after_blank_line = xasprintf("\n%s", notations[i][1]); // as in its own examples
        bool blank_line = strstr(question, after_blank_line) != NULL;
        free(after_blank_line);
        return xasprintf("%.*s%s%s", n, question, blank_line ? "\n" : "", notations[i][1]);
    }
    return xasprintf("Question: %.*s\nAnswer:", n, question);
}
