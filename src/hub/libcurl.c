/* libcurl: loads the library once per process. */
#define _GNU_SOURCE
#include "hub/libcurl.h"

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
