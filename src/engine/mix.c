/*
 * mix: mixes of adapters of which some have DoRA. A forward pass adds plain adapters term by term,
 * but the sum of a mix with DoRA is one adapter (adapter_sum_pack). Requests with the same mix
 * share it; it is freed when the last of them is done. Only the engine's thread uses this file.
 */
#include "engine/internal.h"

#include <stdlib.h>
#include <string.h>

struct mix_sum {
    struct mix_sum *next; /* in engine.mix_sums */
    int refs;
    char key[HASH_LEN]; /* engine_adapters_key */
    struct lora_pack *pack;
};

bool request_mixes_dora(const struct engine_request *r) {
    for (int32_t i = 0; i < r->n_mix; i++)
        if (r->mix[i].adapter && r->mix[i].adapter->config.dora) return true;
    return false;
}

static struct lora_pack *pack_make(const struct engine *e, const struct engine_request *r,
                                   struct error *err) {
    struct adapter *list[ENGINE_MIX_MAX];
    float weights[ENGINE_MIX_MAX];
    for (int32_t i = 0; i < r->n_mix; i++) {
        list[i] = r->mix[i].adapter;
        weights[i] = r->mix[i].weight;
    }
    return adapter_sum_pack(list, weights, r->n_mix, e->o.lora_elem, err);
}

int mix_sum_acquire(struct engine *e, const struct engine_request *r, struct mix_sum **out,
                    struct error *err) {
    char key[HASH_LEN];
    struct mix_sum *s = e->mix_sums;
    *out = NULL;
    if (!request_mixes_dora(r)) return OK;
    engine_adapters_key(r, key);
    while (s && strcmp(s->key, key) != 0) s = s->next;
    if (!s) {
        struct lora_pack *pack = pack_make(e, r, err);
        if (!pack) return err->code;
        s = xcalloc(1, sizeof *s);
        *s = (struct mix_sum){.next = e->mix_sums, .pack = pack};
        memcpy(s->key, key, sizeof key);
        e->mix_sums = s;
    }
    s->refs++;
    *out = s;
    return OK;
}

struct lora_part mix_sum_part(const struct mix_sum *s) {
    return (struct lora_part){.pack = s->pack, .weight = 1};
}

void mix_sum_release(struct engine *e, struct mix_sum *s) {
    if (!s || --s->refs > 0) return;
    struct mix_sum **at = &e->mix_sums;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    lora_pack_free(s->pack);
    free(s);
}
