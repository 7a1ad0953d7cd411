/*
 * hub: models and adapters that are pulled from a hub with Hugging Face's HTTP API into a cache,
 * messages to webhooks, and pages of allowed hosts. No other module sends HTTP requests.
 *
 * Several threads and processes may use the cache at once.
 */
#ifndef SHOAL_HUB_H
#define SHOAL_HUB_H

#include "base/base.h"

/*
 * A repository on the hub is named hf:OWNER/REPO[/FILE][@REV]; REV is a branch, tag or commit, by
 * default "main". It is pulled into the folder CACHE/hub/OWNER/REPO[@REV], where CACHE is
 * $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal. The folder holds the repository's
 * files unchanged and the record .hub.json: repository, revision, commit, and each file's size and
 * hash (64 digits: SHA-256 of the content; 40: git's blob SHA-1). HF_ENDPOINT names another hub.
 * The token in HF_TOKEN, else in the token file of Hugging Face's own client, is sent to that hub
 * and to no other host.
 */
struct hub_options {
    char *to;               /* the folder; NULL: the one in the cache */
    struct strings include; /* globs of files to pull instead of the default selection */
    double backoff, stall;  /* seconds before the first retry (0: 1), and seconds without data after
                               which a connection counts as lost (0: 60) */
    bool dry_run;           /* for the command, which then calls hub_plan; hub_pull ignores it */
};
bool hub_is_name(const char *path); /* begins with "hf:" */
/* The absolute path with links resolved; a hub name or a missing path is returned unchanged.
 * malloc'ed. */
char *path_absolute(const char *path);
/* The path of the folder or GGUF file that a name refers to, malloc'ed; if it is not pulled, NULL
 * and an error with the command to run. Does not use the network. */
char *hub_cached_path(const char *name, struct error *err);
char *hub_cache_dir(void); /* the folder CACHE/hub, malloc'ed; NULL: no variable names it */
/*
 * Downloads and verifies the missing and damaged files of the revision's current commit, and
 * renames them into the folder once all of them are complete. The next pull continues an
 * interrupted one. Returns the record, with "path" and "loaded" (bytes downloaded) added, or NULL
 * on an error.
 */
json_t *hub_pull(const char *name, const struct hub_options *o, struct error *err);
/* The files that hub_pull would download: {repo, commit, folder, files, bytes, "here already"}.
 * Requests nothing but the hub's listing. */
json_t *hub_plan(const char *name, const struct hub_options *o, struct error *err);
/* An array of the records in the cache, each with "path". */
json_t *hub_list(struct error *err);

/* webhooks */

/* Sends a POST request with `body`, which is JSON, and discards the response. Redirects are not
 * followed. ERR_USAGE: `url` is not an http or https address. ERR_IO: no response within `seconds`,
 * or a status other than 2xx. ERR_MISSING: libcurl is not installed. `url` may be a secret, so no
 * message contains it. */
int http_post_json(const char *url, const char *body, double seconds, struct error *err);

/* pages */

struct http_page {
    char *type;      /* the header Content-Type; "" if the server sent none */
    struct buf body; /* at most `limit` bytes of it */
};
/*
 * Sends a GET request for an address that an untrusted text may have chosen, and follows up to 3
 * redirects. `hosts` allows "HOST", which is the scheme's own port, and "HOST:PORT", in upper or
 * lower case; the host of every redirect must be allowed too. A host that is neither an IP address
 * nor "localhost" must have a public address: the address of the connection itself is checked, so
 * there is no proxy. No credentials and cookies are sent.
 *
 * ERR_USAGE: not an http or https address, or one with a password. ERR_STATE: a host or address
 * that is not allowed. ERR_IO: no response within `seconds`, or a status other than 2xx.
 * ERR_MISSING: libcurl is not installed. The caller releases `out` after OK.
 */
int http_get_page(const char *url, const struct strings *hosts, size_t limit, double seconds,
                  struct http_page *out, struct error *err);
void http_page_release(struct http_page *p);

#endif
