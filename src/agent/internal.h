/*
 * agent: declarations shared by the files of the tools: the list of tools, their results and texts
 * (tools.c), and the built-in tools (builtin.c, builtin_files.c, builtin_code.c, builtin_http.c,
 * builtin_memory.c).
 */
#ifndef SHOAL_AGENT_INTERNAL_H
#define SHOAL_AGENT_INTERNAL_H

#include "agent/agent.h"

/* An argument of a built-in tool; all are texts and required. */
struct tool_argument {
    const char *name, *description;
    int max_length;             /* characters */
    const char *const *choices; /* ends with NULL; NULL: any text */
};

/* The member of struct agent_tool_options that a built-in tool needs. */
enum tool_need {
    NEEDS_NOTHING,
    NEEDS_KNOWLEDGE,
    NEEDS_MEMORY,
    NEEDS_TEAM,
    NEEDS_ROOT,
    NEEDS_HOSTS
};

/* How a built-in tool works. */
struct tool_kind {
    enum tool_need need;
    struct tool_argument arguments[2]; /* a NULL name ends them */
    /* Sets *ctx to the tool's state, which is NULL before. May be NULL. */
    int (*open)(const struct agent_tool_options *o, void **ctx, struct error *err);
    int (*call)(void *ctx, const json_t *arguments, struct buf *out, struct error *err);
    void (*spent)(void *ctx, int64_t *prefilled, int64_t *generated); /* see struct agent_tool */
    void (*release)(void *ctx); /* may be NULL; ctx may be NULL */
};
extern const struct tool_kind read_file_kind, list_files_kind, python_kind, sh_kind,
    check_code_kind, http_get_kind, memory_search_kind, memory_write_kind, ask_kind, debate_kind;

/*
 * Appends a text of any bytes as valid UTF-8 without control characters except newline and tab;
 * each wrong byte becomes U+FFFD. At most `limit` bytes, which is at least 64: a longer text is cut
 * and its last line is "… (cut)".
 */
void text_add_clean(struct buf *out, const char *text, size_t len, size_t limit);

#endif
