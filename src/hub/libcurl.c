/* libcurl: loads the library once per process, and sends the messages to webhooks. */
#define _GNU_SOURCE
#include "hub/libcurl.h"
#include "hub/hub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static struct libcurl lib;
static struct error load_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void) {
    void *so = dlopen("libcurl.so.4", RTLD_NOW), *symbol;
    if (!so) {
        error_set(&load_error, ERR_MISSING, "libcurl is not installed (%s); install libcurl4",
                  dlerror());
        return;
    }
#define LOAD(name)                                                                                 \
    if (!(symbol = dlsym(so, #name))) {                                                            \
        error_set(&load_error, ERR_MISSING, "this libcurl has no '%s'; install a newer one",       \
                  #name);                                                                          \
        return;                                                                                    \
    }                                                                                              \
    memcpy(&lib.name, &symbol, sizeof symbol);
    CURL_FUNCTIONS(LOAD)
}

const struct libcurl *libcurl_load(struct error *err) {
    pthread_once(&once, load);
    if (!load_error.code) return &lib;
    *err = load_error;
    return NULL;
}

static size_t discard_body(char *data, size_t size, size_t n, void *ctx) {
    (void)data, (void)ctx;
    return size * n;
}

static int request_post(CURL *c, struct curl_slist *headers, const char *url, const char *body,
                        double seconds, struct error *err) {
    long status = 0;
    char message[CURL_ERROR_SIZE] = "";
    lib.curl_easy_setopt(c, CURLOPT_URL, url);
    lib.curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    lib.curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    lib.curl_easy_setopt(c, CURLOPT_POSTFIELDS, body);
    lib.curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    lib.curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)(seconds * 1000));
    lib.curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, discard_body);
    lib.curl_easy_setopt(c, CURLOPT_ERRORBUFFER, message);
    lib.curl_easy_setopt(c, CURLOPT_USERAGENT, "shoal/" SHOAL_VERSION);
    CURLcode code = lib.curl_easy_perform(c);
    if (code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT)
        return error_set(err, ERR_USAGE, "expected http://… or https://…");
    if (code != CURLE_OK) return error_set(err, ERR_IO, "%s", lib.curl_easy_strerror(code));
    lib.curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &status);
    return status >= 200 && status < 300 ? OK : error_set(err, ERR_IO, "status %ld", status);
}

int http_post_json(const char *url, const char *body, double seconds, struct error *err) {
    if (!libcurl_load(err)) return err->code;
    lib.curl_global_init(CURL_GLOBAL_DEFAULT); // reference-counted
    CURL *c = lib.curl_easy_init();
    struct curl_slist *headers = lib.curl_slist_append(NULL, "Content-Type: application/json");
    CHECK(c && headers);
    int rc = request_post(c, headers, url, body, seconds, err);
    lib.curl_slist_free_all(headers);
    lib.curl_easy_cleanup(c);
    lib.curl_global_cleanup();
    return rc;
}
