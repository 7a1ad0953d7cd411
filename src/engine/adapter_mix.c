/* adapter_mix: weighted sums of adapters, as users write them: "A=0.7,B=0.3". */
#define _GNU_SOURCE
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

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

int adapter_mix_open(struct adapter_mix *m, adapter_open_fn *open, void *ctx, struct error *err) {
    for (int i = 0; i < m->paths.n; i++) {
        struct adapter *a = open(ctx, m->paths.v[i], err);
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
