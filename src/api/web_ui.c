/*
 * web_ui: serves the web page. The page is embedded in the program, so it is always available, has
 * the version of the program, and loads nothing from other hosts.
 *
 * The files of web/ are served unchanged; page.inc lists them. They contain no secrets, so they
 * need no API key; the requests that the page makes need one. Browsers cache the files and
 * revalidate them by their hash.
 */
#include "api/internal.h"

#include <stdio.h>
#include <string.h>

/* The assembler includes the bytes: a megabyte of array in C takes a minute to compile. */
#define FILE_ROW(n, name)                                                                          \
    __asm__(".pushsection .rodata\n"                                                               \
            "page_file_" #n ":\n"                                                                  \
            ".incbin \"web/" name "\"\n"                                                           \
            "page_file_" #n "_end:\n"                                                              \
            ".popsection\n");                                                                      \
    extern const char page_file_##n[], page_file_##n##_end[];
#include "page.inc"
#undef FILE_ROW

static const struct {
    const char *name, *from, *to;
} files[] = {
#define FILE_ROW(n, name) {name, page_file_##n, page_file_##n##_end},
#include "page.inc"
#undef FILE_ROW
};

/* The page may only load files of this server, and other pages cannot frame it. */
static const char CONTENT_SECURITY_POLICY[] =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static const char *content_type(const char *name) {
    static const char *const types[][2] = {{".html", "text/html; charset=utf-8"},
                                           {".js", "text/javascript; charset=utf-8"},
                                           {".css", "text/css; charset=utf-8"},
                                           {".svg", "image/svg+xml"}};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < ARRAY_LEN(types); i++)
        if (strcmp(dot, types[i][0]) == 0) return types[i][1];
    return "text/plain; charset=utf-8";
}

/* Whether the client has this version of a file. Searches for the tag as a substring, because
 * If-None-Match is a list, in which a proxy that compressed the file may have marked the tag as
 * weak (W/). */
static bool etag_matches(const struct exchange *x, const char *tag) {
    const char *etags = exchange_header(x, "If-None-Match");
    return etags && (strstr(etags, tag) || strcmp(etags, "*") == 0);
}

void web_ui_handle(void *ctx, struct exchange *x) {
    const char *name = *exchange_wildcard(x) ? exchange_wildcard(x) : "index.html";
    char hash[HASH_LEN], tag[HASH_LEN + 2];
    size_t i = 0;
    (void)ctx;
    while (i < ARRAY_LEN(files) && strcmp(files[i].name, name) != 0) i++;
    if (i == ARRAY_LEN(files)) {
        api_fail(x, 404, NULL, NULL, "not_found", "the page has no file '%.100s'", name);
        return;
    }
    size_t n = (size_t)(files[i].to - files[i].from);
    sha256_bytes(files[i].from, n, hash);
    snprintf(tag, sizeof tag, "\"%s\"", hash);
    exchange_add_header(x, "ETag", tag);
    exchange_add_header(x, "Cache-Control", "no-cache");
    exchange_add_header(x, "Content-Security-Policy", CONTENT_SECURITY_POLICY);
    exchange_add_header(x, "Referrer-Policy", "no-referrer");
    if (etag_matches(x, tag))
        exchange_reply(x, 304, NULL, "", 0);
    else
        exchange_reply(x, 200, content_type(name), files[i].from, n);
}

static const struct http_route routes[] = {
    {"GET", "/page/*", SCOPE_OPEN, web_ui_handle},
    {0},
};

const struct server_module page_module = {.routes = routes};
