/*
 * jinja: chat templates, the part of Jinja2 that Hugging Face's templates are written in.
 *
 * A `struct jinja` is parsed once, never written again and shared by all threads; rendering keeps
 * its state to itself. The settings are those of transformers: trim_blocks, lstrip_blocks, the
 * immutable sandbox, break and continue, its `tojson`, raise_exception, strftime_now and
 * {% generation %}. What this subset lacks is an error that names it with its line.
 *
 * A template is foreign code and reaches nothing but its variables. Its length, recursion, steps
 * and memory are bounded: every operation is charged to one budget in proportion to its work, and
 * an error names the limit that was reached.
 *
 * Every byte of the result says where it came from, so that a caller can tell the template's own
 * words, where special tokens count, from what people wrote, where they must not, and can find the
 * assistant's turns in the output of any template.
 */
#ifndef SHOAL_JINJA_H
#define SHOAL_JINJA_H

#include "base/base.h"

#define JINJA_MAX_TEXT ((size_t)1 << 20) /* bytes of a template */
#define JINJA_MAX_STEPS                                                                            \
    ((uint64_t)20000000)                    /* of a parse, or of renderings that share a budget    \
                                             */
#define JINJA_MAX_BYTES ((size_t)256 << 20) /* of memory, for one parse or rendering */
#define JINJA_OWN_BYTES ((size_t)32 << 20)  /* ... of which so many beside what the input takes */
#define JINJA_OWN_TEXT ((size_t)1 << 20)    /* of the result, beside a multiple of the input */

struct jinja;
/* Errors say the line; callers say whose template it is. */
struct jinja *jinja_parse(const char *text, size_t len, struct error *err);
void jinja_free(struct jinja *j);

/* Where a byte came from. Numbers and names of roles count as the template's. */
#define JINJA_DATA 1      /* a string of the variables */
#define JINJA_ASSISTANT 2 /* one inside a message of the assistant */
#define JINJA_GENERATED 4 /* written within {% generation %} */

/* Bytes from `begin` on were written while a loop stood at messages[message]; -1: at none. */
struct jinja_run {
    size_t begin;
    int message;
};
struct jinja_output {
    char *text;       /* [n] and a NUL */
    uint8_t *origins; /* [n] */
    size_t n;
    struct jinja_run *runs; /* [n_runs], ascending; they cover the text */
    size_t n_runs;
    uint64_t steps; /* what it took; after an error too */
    size_t bytes;
};
struct jinja_input {
    const json_t *vars;    /* object; its "messages" are known as the conversation */
    const json_t *trusted; /* object or NULL: strings that count as the template's (bos_token …) */
    int64_t now;           /* of strftime_now, seconds since 1970 in UTC; < 0: it is undefined */
    uint64_t max_steps;    /* the budget; 0: JINJA_MAX_STEPS */
    uint64_t spent;        /* steps of the same budget that earlier renderings took */
    /* Polled about every millisecond; true ends the rendering. NULL: it is never ended. */
    bool (*stop)(void *ctx);
    void *stop_ctx;
};
/* raise_exception is ERR_MISMATCH, `stop` ERR_STATE, anything else, limits too, ERR_FORMAT. Free
 * the output with jinja_output_release, also after an error. */
int jinja_render(const struct jinja *j, const struct jinja_input *in, struct jinja_output *out,
                 struct error *err);
void jinja_output_release(struct jinja_output *out);

#endif
