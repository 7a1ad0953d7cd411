/*
 * sample_render: a sample as text with marks around its targets.
 *
 * A character may consist of several tokens, so tokens are not decoded one by one but in runs: a
 * run of targets, or a run of other tokens. The first token is never a target, because no token
 * precedes it. Control characters are replaced.
 */
#include "data/data.h"

static bool is_target(const struct train_sample *s, int32_t i) {
    return i > 0 && s->mask[i];
}

/* Appends the run that begins at token i and returns its end. */
static int32_t run_append(const struct train_sample *s, const struct tokenizer *tok, int32_t i,
                          struct buf *out) {
    struct buf raw = {0};
    int32_t end = i + 1;
    while (end < s->n && is_target(s, end) == is_target(s, i)) end++;
    tokenizer_decode(tok, s->tokens + i, end - i, true, &raw);
    buf_add_sanitized(out, raw.data, raw.len);
    buf_release(&raw);
    return end;
}

void train_sample_render(const struct train_sample *s, const struct tokenizer *tok,
                         const char *mark_begin, const char *mark_end, struct buf *out) {
    for (int32_t i = 0; i < s->n;) {
        bool target = is_target(s, i);
        if (target) buf_puts(out, mark_begin);
        i = run_append(s, tok, i, out);
        if (target) buf_puts(out, mark_end);
    }
}

json_t *train_sample_json(const struct train_sample *s, const struct tokenizer *tok) {
    json_t *parts = json_array(), *ids = json_array(), *mask = json_array();
    for (int32_t i = 0; i < s->n; i++) {
        json_array_append_new(ids, json_integer(s->tokens[i]));
        json_array_append_new(mask, json_integer(is_target(s, i)));
    }
    for (int32_t i = 0; i < s->n;) {
        struct buf text = {0};
        bool mark = is_target(s, i);
        buf_puts(&text, "");
        i = run_append(s, tok, i, &text);
        json_array_append_new(parts, json_pack("{s:s,s:b}", "text", text.data, "learned", mark));
        buf_release(&text);
    }
    return json_pack("{s:o,s:o,s:o}", "parts", parts, "ids", ids, "mask", mask);
}
