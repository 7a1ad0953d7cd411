/*
 * hub: the cache of models and adapters pulled from a hub that speaks Hugging Face's routes, and
 * the one other thing that goes out over HTTP, a message to a webhook.
 *
 * Several threads and processes may use the cache at once.
 */
#ifndef SHOAL_HUB_H
#define SHOAL_HUB_H

#include "base/base.h"

/*
 * A repository on the hub is named hf:OWNER/REPO[/FILE][@REV]; REV is a branch, tag or commit, and
 * "main" when none is named. It is pulled into a folder of its own, $SHOAL_CACHE (else
 * $XDG_CACHE_HOME/shoal, else ~/.cache/shoal) /hub/OWNER/REPO[@REV], which holds the repository's
 * files as they are and the record .hub.json: repository, revision, commit, and each file's size
 * and hash (64 digits: SHA-256 of the content; 40: git's blob SHA-1). HF_ENDPOINT names another
 * hub, HF_TOKEN (else the token file of the hub's own client) is sent to that hub and to no other
 * host.
 */
struct hub_options {
    char *to;               /* the folder; NULL: the one in the cache */
    struct strings include; /* globs of files to pull instead of the usual ones */
    double backoff, stall;  /* seconds: the first wait before a retry, silence that counts as a
                               lost connection; 0: 1 and 60 */
    bool dry_run;           /* for whoever asks hub_plan first */
};
bool hub_is_name(const char *path); /* begins with "hf:" */
/* The folder, or the GGUF file, that a name stands for, malloc'ed; NULL with the command to run
 * when it is not pulled. Does not touch the network. */
char *hub_cached_path(const char *name, struct error *err);
char *hub_cache_dir(void); /* the folder of what is pulled; NULL: there is none. malloc'ed */
/*
 * Makes the folder hold the revision as it is on the hub now: what is missing or damaged is
 * downloaded, verified, and put in place when all of it is here. An interrupted pull is continued
 * by the next. Returns the record, with "path" and the bytes "loaded" added, or NULL.
 */
json_t *hub_pull(const char *name, const struct hub_options *o, struct error *err);
/* What that would download: {repo, commit, folder, files, bytes, "here already"}. Only asks the hub
 * for its listing. */
json_t *hub_plan(const char *name, const struct hub_options *o, struct error *err);
/* An array of the records in the cache, each with "path". */
json_t *hub_list(struct error *err);

/* webhooks */

/* Sends a body and throws the answer away; redirects are not followed. ERR_USAGE: url is no http or
 * https address; ERR_IO: no answer within so many seconds, or one that is no success. The url may
 * be a secret: it is in no message. */
int http_post_json(const char *url, const char *body, double seconds, struct error *err);

#endif
