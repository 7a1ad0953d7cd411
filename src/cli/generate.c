/* generate: parses the sampling options and the adapters of a request from the command line. */
#define _GNU_SOURCE
#include "cli/generate.h"

#include <stdlib.h>
#include <string.h>

struct sampling_params sampling_from_options(const struct sampling_options *o, int64_t i) {
    return (struct sampling_params){.temperature = (float)o->temperature,
                                    .top_k = (int32_t)o->top_k,
                                    .top_p = (float)o->top_p,
                                    .min_p = (float)o->min_p,
                                    .seed = (uint64_t)(o->seed + i),
                                    .typical_p = (float)o->typical_p,
                                    .repetition_penalty = (float)o->repeat,
                                    .presence_penalty = (float)o->presence,
                                    .frequency_penalty = (float)o->frequency};
}

/* If a path with this text exists, the whole text is the path, whatever its name contains. */
int adapter_mix_parse(struct adapter_mix *m, const char *text, struct error *err) {
    *m = (struct adapter_mix){.weighted = false};
    if (!text) return OK;
    char *copy = xstrdup(text), *rest = path_exists(text) ? NULL : copy, *term;
    if (!rest) strings_add(&m->paths, text);
    m->weights[0] = 1;
    while ((term = strsep(&rest, ",")) != NULL && m->paths.n < ENGINE_MIX_MAX) {
        if (adapter_weight_parse(term, &m->weights[m->paths.n])) m->weighted = true;
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

int adapter_mix_open(struct adapter_mix *m, struct setup *s, struct error *err) {
    for (int i = 0; i < m->paths.n; i++) {
        struct adapter *a = setup_adapter(s, m->paths.v[i], err);
        if (!a) return err->code;
        m->terms[i] = (struct weighted_adapter){.adapter = a, .weight = m->weights[i]};
    }
    return OK;
}

void adapter_mix_apply(const struct adapter_mix *m, struct engine_request *r) {
    r->adapter = m->weighted ? NULL : m->terms[0].adapter;
    r->mix = m->terms;
    r->n_mix = m->weighted ? m->paths.n : 0;
}

void adapter_mix_release(struct adapter_mix *m) {
    strings_release(&m->paths);
}

int32_t model_stop_tokens(const struct model *m, int32_t out[2]) {
    const int32_t ends[2] = {tokenizer_eos(m->tok), tokenizer_eot(m->tok)};
    int32_t n = 0;
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) out[n++] = ends[i];
    return n;
}
