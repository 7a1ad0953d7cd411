/*
 * template: the template language (Jinja) and conversations as tokens by a model's chat template.
 *
 * Jinja: the part of Jinja2 that Hugging Face's templates use.
 *
 * A `struct jinja` is parsed once, is immutable afterwards and is shared by all threads; each
 * rendering has its own state. The settings are those of transformers: trim_blocks, lstrip_blocks,
 * the immutable sandbox, break and continue, the `tojson` of transformers, raise_exception,
 * strftime_now and {% generation %}. A feature that is not supported is an error with its name and
 * line.
 *
 * A template is untrusted code and has access only to its variables. Its length, recursion, steps
 * and memory are bounded: every operation is charged to one budget in proportion to its work, and
 * an error names the limit that was reached.
 *
 * Every byte of the result has an origin. A caller can therefore distinguish the template's own
 * text, in which special tokens are recognised, from the users' text, in which they must not be,
 * and can find the assistant's turns in the output of any template.
 *
 * A chat template belongs to the tokenizer for which it was set; tokenizer_free frees it.
 */
#ifndef SHOAL_TEMPLATE_H
#define SHOAL_TEMPLATE_H

#include "tokenizer/tokenizer.h"

/* Jinja */

#define JINJA_MAX_TEXT ((size_t)1 << 20)     /* bytes of a template */
#define JINJA_MAX_STEPS ((uint64_t)20000000) /* per parse, or for all renderings of one budget */
#define JINJA_MAX_BYTES ((size_t)256 << 20)  /* memory of one parse or rendering */
/* A rendering's limits of memory and output are the two values below, plus a multiple of the memory
 * of its variables; the limit of memory is at most JINJA_MAX_BYTES. */
#define JINJA_BASE_BYTES ((size_t)32 << 20) /* memory */
#define JINJA_BASE_TEXT ((size_t)1 << 20)   /* output */

struct jinja;
/* The error has the line number; callers add the name of the template. */
struct jinja *jinja_parse(const char *text, size_t len, struct error *err);
/* With Jinja2's own settings and StrictUndefined, as lm-evaluation-harness renders its prompts:
 * blocks keep the white space around them, the newline at the end is kept, and an undefined value
 * is an error, except in `is defined`, `is undefined` and `default`. */
struct jinja *jinja_parse_strict(const char *text, size_t len, struct error *err);
void jinja_free(struct jinja *j);

/* The origin of a byte, as bits; 0: the template's text. Numbers and the names of known roles count
 * as the template's text. */
#define JINJA_DATA 1      /* a string of the variables */
#define JINJA_ASSISTANT 2 /* a string in a message of the assistant; JINJA_DATA is set as well */
#define JINJA_GENERATED 4 /* written within {% generation %} */

/* The bytes from `begin` to the next range were written while the item of a loop was
 * messages[message]; message is -1 if no item of a loop was a message. */
struct jinja_message_range {
    size_t begin;
    int message;
};
struct jinja_output {
    char *text;       /* [n] and a NUL */
    uint8_t *origins; /* [n] */
    size_t n;
    struct jinja_message_range *message_ranges; /* [n_message_ranges] ascending; they cover text */
    size_t n_message_ranges;
    uint64_t steps; /* steps used by this rendering; set after an error too */
    size_t bytes;   /* memory used by this rendering; set after an error too */
};
struct jinja_input {
    const json_t *vars;    /* object; its "messages" are the conversation */
    const json_t *trusted; /* object or NULL: variables whose strings count as the template's text
                              (bos_token …) */
    int64_t now; /* for strftime_now, seconds since 1970 in UTC; < 0: strftime_now is undefined */
    uint64_t max_steps;  /* the budget; 0: JINJA_MAX_STEPS */
    uint64_t steps_used; /* steps of the same budget that earlier renderings used */
    /* Polled about every millisecond; true ends the rendering. NULL: never polled. */
    bool (*stop)(void *ctx);
    void *stop_ctx;
};
/* raise_exception gives ERR_MISMATCH, `stop` ERR_STATE, a system without memory ERR_MEMORY, all
 * other errors and limits ERR_FORMAT. Free the output with jinja_output_release, also after an
 * error. */
int jinja_render(const struct jinja *j, const struct jinja_input *in, struct jinja_output *out,
                 struct error *err);
void jinja_output_release(struct jinja_output *out);

/* conversations */

struct chat_message {
    const char *role, *content;
};
/* The template that is written to the files of models without a template: ChatML,
 * <|im_start|>role\ncontent<|im_end|>\n … and, to generate, <|im_start|>assistant\n. A tokenizer
 * without another template encodes ChatML directly, without rendering. If its vocabulary lacks one
 * of the two special tokens, both are encoded as plain text. */
extern const char chatml_template[];
/* Sets the tokenizer's chat template (Jinja); NULL is ChatML. model_open calls it, before other
 * threads use the tokenizer. A syntax error in the template is reported only when a conversation is
 * encoded. */
void tokenizer_set_chat_template(struct tokenizer *t, const char *text);
/* The token that ends the assistant's turn: the first that exists of the template's token,
 * <|im_end|> and EOS. */
int32_t tokenizer_eot(const struct tokenizer *t);
/* Appends ids; `mask` (may be NULL) gets one byte per token: 1 for the assistant's own text and the
 * end of its turn. The content of messages is never encoded as special tokens. If the template
 * raises an exception, the error has its message. */
int chat_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                bool generation_prompt, struct token_ids *out, struct buf *mask, struct error *err);

/* The input of chat_template_encode and chat_template_render: messages as JSON, and the other
 * inputs of templates (tool calls, tools, content parts). */
struct chat_template_input {
    const json_t *messages; /* array of objects, as in OpenAI's API */
    const json_t *tools;    /* array, or NULL */
    const json_t *extra;    /* object of further variables (enable_thinking, documents), or NULL */
    const char *template;   /* Jinja that chat_template_encode uses instead of the tokenizer's
                               template; or NULL */
    bool generation_prompt;
    /* Polled while a template is rendered; true ends it with ERR_STATE. NULL: never polled. */
    bool (*stop)(void *ctx);
    void *stop_ctx;
};
int chat_template_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct token_ids *out, struct buf *mask, struct error *err);

/* A part of a template's output. `user_data`: text from the variables, which is never encoded as
 * special tokens. `assistant`: the assistant's part of a turn, after the generation prompt, with
 * the end of the turn. In a template with {% generation %} it is the text within that block. In
 * other templates it is the text that is written while the item of a loop is a message of the
 * assistant, and the strings of such a message wherever they are written. */
struct chat_span {
    size_t begin, end;
    bool user_data, assistant;
};
struct chat_text {
    char *text;
    size_t len;
    struct chat_span *spans; /* [n_spans] ascending; they cover the text */
    size_t n_spans;
};
int chat_template_render(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct chat_text *out, struct error *err);
void chat_text_release(struct chat_text *c);

#endif
