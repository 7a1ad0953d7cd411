/*
 * Drawing and adapters of a request, from what a command line says.
 */
#define _GNU_SOURCE
#include "cli/generate.h"

#include <stdlib.h>
#include <string.h>

struct sampling sampling_of(const struct sampling_options *o, int64_t i) {
    return (struct sampling){.temperature = (float)o->temp,
                             .top_k = (int32_t)o->top_k,
                             .top_p = (float)o->top_p,
                             .min_p = (float)o->min_p,
                             .seed = (uint64_t)(o->seed + i),
                             .typical_p = (float)o->typical_p,
                             .repetition_penalty = (float)o->repeat,
                             .presence_penalty = (float)o->presence,
                             .frequency_penalty = (float)o->frequency};
}

/* A path that exists is itself, whatever is in its name. */
int mix_parse(struct mix *m, const char *text, struct error *err) {
    *m = (struct mix){.weighted = false};
    if (!text) return OK;
    char *copy = xstrdup(text), *rest = path_exists(text) ? NULL : copy, *term;
    if (!rest) strings_add(&m->paths, text);
    m->weights[0] = 1;
    while ((term = strsep(&rest, ",")) != NULL && m->paths.n < ENGINE_MIX_MAX) {
        if (adapter_weight_cut(term, &m->weights[m->paths.n])) m->weighted = true;
        if (*term) strings_add(&m->paths, term);
    }
    int rc = OK;
    if (term)
        rc = error_set(err, ERR_USAGE, "more than %d adapters in a mix", ENGINE_MIX_MAX);
    else if (m->paths.n == 0)
        rc = error_set(err, ERR_USAGE, "'%s' names no adapter", text);
    m->weighted |= m->paths.n > 1;
    free(copy);
    return rc;
}

int mix_open(struct mix *m, struct setup *s, struct error *err) {
    for (int i = 0; i < m->paths.n; i++) {
        struct adapter *a = setup_adapter(s, m->paths.v[i], err);
        if (!a) return err->code;
        m->terms[i] = (struct mix_term){.adapter = a, .weight = m->weights[i]};
    }
    return OK;
}

void mix_apply(const struct mix *m, struct request *r) {
    r->adapter = m->weighted ? NULL : m->terms[0].adapter;
    r->mix = m->terms;
    r->n_mix = m->weighted ? m->paths.n : 0;
}

void mix_release(struct mix *m) {
    strings_release(&m->paths);
}

int32_t stop_tokens(const struct model *m, int32_t out[2]) {
    const int32_t ends[2] = {tok_eos(m->tok), tok_chat_end(m->tok)};
    int32_t n = 0;
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) out[n++] = ends[i];
    return n;
}
