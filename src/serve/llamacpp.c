/*
 * llamacpp: adapters by number and scale, as llama.cpp's server has them. A scale set for all is
 * the weight with which an adapter stands in requests that name no model and no adapters of their
 * own.
 */
#define _GNU_SOURCE
#include "serve/server.h"

static void list_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    json_t *list = json_array();
    int n;
    struct listed *v = server_adapters(s, &n);
    for (int i = 0; i < n; i++)
        if (!v[i].bare)
            json_array_append_new(list, json_pack("{s:i,s:o,s:s,s:f}", "id", v[i].id, "path",
                                                  json_path(v[i].path), "name", v[i].name, "scale",
                                                  v[i].scale));
    server_adapters_free(v, n);
    exchange_reply_json(x, 200, list);
}

static void scale_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    json_t *body = exchange_json(x, &err);
    int rc = body ? server_scales(s, body, &err) : err.code;
    if (rc == OK)
        exchange_reply_json(x, 200, json_pack("{s:b}", "success", 1));
    else
        api_fail_error(x, &err, NULL);
    json_decref(body);
}

const struct route llamacpp_routes[] = {
    {"GET", "/lora-adapters", CHAT, list_handle},
    {"POST", "/lora-adapters", ADMIN, scale_handle},
    {0},
};
