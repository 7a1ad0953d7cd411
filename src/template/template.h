/*
 * template: the template language (Jinja) and conversations as tokens by a model's chat template.
 *
 * Jinja: the part of Jinja2 that Hugging Face's templates are written in.
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
 *
 * A chat template belongs to the tokenizer that it was set for and is freed with it.
 */
#ifndef SHOAL_TEMPLATE_H
#define SHOAL_TEMPLATE_H

#include "tokenizer/tokenizer.h"

/* Jinja */

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

/* conversations */

struct chat_message {
    const char *role, *content;
};
/* The template that writers give to models without one: ChatML,
 * <|im_start|>role\ncontent<|im_end|>\n … and, to generate, <|im_start|>assistant\n. A tokenizer
 * with no other template encodes it without rendering, and one that lacks the two special tokens
 * gets them as plain text. */
extern const char chatml_template[];
/* Gives the tokenizer a chat template (Jinja); NULL is ChatML. model_open does it. A
 * template that cannot be read is no error before a conversation is to be encoded. */
void tokenizer_set_chat_template(struct tokenizer *t, const char *text);
/* The token that ends the assistant's turn: the template's, <|im_end|>, or the end of text. */
int32_t tokenizer_eot(const struct tokenizer *t);
/* Appends ids; `mask` (may be NULL) gets one byte a token: 1 where the assistant's own words are,
 * with the end of its turn. What messages say is never a special token. Refused: what the template
 * refuses, with its own words. */
int chat_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                bool generation_prompt, struct token_ids *out, struct buf *mask, struct error *err);

/* The same from JSON, with what templates know besides texts: tool calls, tools, parts. */
struct chat_template_input {
    const json_t *messages; /* array of objects, as in OpenAI's API */
    const json_t *tools;    /* array, or NULL */
    const json_t *extra;    /* object of further variables (enable_thinking, documents), or NULL */
    const char *template; /* Jinja, for chat_template_encode in place of the tokenizer's; or NULL */
    bool generation_prompt;
    /* Polled while a template is rendered; true ends it with ERR_STATE. NULL: it is never ended. */
    bool (*stop)(void *ctx);
    void *stop_ctx;
};
int chat_template_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct token_ids *out, struct buf *mask, struct error *err);

/* What the template writes. The spans cover the text: `data` is what people wrote, where no special
 * token may be read; `own` is what the assistant has to say, from behind the header that generation
 * is given to the end of its turn.
 * `own` is what stands within {% generation %}; in templates without that, what was written while a
 * loop stood at a message of the assistant, and its strings wherever they are written. */
struct chat_span {
    size_t begin, end;
    bool data, own;
};
struct chat_text {
    char *text;
    size_t len;
    struct chat_span *spans;
    size_t n_spans;
};
int chat_template_render(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct chat_text *out, struct error *err);
void chat_text_release(struct chat_text *c);

#endif
