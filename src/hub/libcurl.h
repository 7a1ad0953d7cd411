/*
 * libcurl: the library used for all outgoing HTTP.
 *
 * It is loaded with dlopen at its first use. If it were linked, its thirty dependencies would cost
 * every command 6 MB of memory, and a goal is that twenty agents run in 100 MB.
 */
#ifndef SHOAL_HUB_LIBCURL_H
#define SHOAL_HUB_LIBCURL_H

#include "base/base.h"

#define CURL_DISABLE_TYPECHECK // its checks are macros with the names below
#include <curl/curl.h>

#if LIBCURL_VERSION_NUM < 0x075500
#error libcurl before 7.85 may keep credentials on redirects to another port
#endif

#define CURL_FUNCTIONS(X)                                                                          \
    X(curl_global_init)                                                                            \
    X(curl_global_cleanup)                                                                         \
    X(curl_easy_init)                                                                              \
    X(curl_easy_cleanup)                                                                           \
    X(curl_easy_setopt)                                                                            \
    X(curl_easy_getinfo)                                                                           \
    X(curl_easy_perform)                                                                           \
    X(curl_easy_header)                                                                            \
    X(curl_easy_strerror)                                                                          \
    X(curl_free)                                                                                   \
    X(curl_slist_append)                                                                           \
    X(curl_slist_free_all)                                                                         \
    X(curl_url)                                                                                    \
    X(curl_url_cleanup)                                                                            \
    X(curl_url_get)                                                                                \
    X(curl_url_set)
struct libcurl {
#define MEMBER(name) __typeof__(&name) name;
    CURL_FUNCTIONS(MEMBER)
#undef MEMBER
};
/* Any thread may call; the library stays loaded. NULL with ERR_MISSING if it is not installed. */
const struct libcurl *libcurl_load(struct error *err);

#endif
