/*
 * hub: declarations shared by the files of the hub client: names, listings and the choice of files
 * (hub.c), hashes (digest.c), requests (fetch.c), and pages of allowed hosts (page.c).
 */
#ifndef SHOAL_HUB_INTERNAL_H
#define SHOAL_HUB_INTERNAL_H

#include "hub/hub.h"

/* hf:OWNER/REPO[/FILE][@REV] */
struct hub_ref {
    char repo[200]; /* "OWNER/REPO" */
    char rev[128];  /* "main" if omitted */
    char file[512]; /* "" if omitted */
};
int hub_ref_parse(const char *text, struct hub_ref *out, struct error *err);

/* A file that the hub lists. `hash` is hexadecimal: 64 digits are the content's SHA-256; 40 digits
 * are git's blob SHA-1, which the hub gives for small files only. */
struct hub_file {
    const char *path;
    int64_t size;
    char hash[HASH_LEN];
    bool wanted, present; /* selected for this pull; present locally with the right hash */
};
struct hub_repo {
    char commit[41];
    struct hub_file *files;
    int n;
    struct arena arena; /* the paths */
};
/* Whether a file name from the server stays inside the folder that it is put in. */
bool hub_path_safe(const char *path);
/* Fills `r` from the hub's listing. The caller releases `r`, also after an error. */
int hub_repo_parse(const json_t *listing, struct hub_repo *r, struct error *err);
/* Sets `wanted` of each file: the file that `name` names and those whose whole paths match a glob
 * of `include`; the default selection if there is neither. */
int hub_repo_select(struct hub_repo *r, const struct hub_ref *name, const struct strings *include,
                    struct error *err);
void hub_repo_release(struct hub_repo *r);

/* Hashes the content of a file whose size and expected hash are known. The length of the expected
 * hash decides which hash is computed. */
struct hub_digest {
    bool git;
    struct sha256 sha256;
    struct {
        uint32_t state[5];
        uint8_t block[64];
        uint64_t len;
    } sha1;
};
void hub_digest_init(struct hub_digest *d, const struct hub_file *f);
void hub_digest_add(struct hub_digest *d, const void *p, size_t n);
bool hub_digest_matches(struct hub_digest *d, const struct hub_file *f); /* ends the hash */

/* A client of the hub with one connection, for one thread at a time. `name` is borrowed until
 * hub_client_free. */
struct hub_client;
struct hub_client *hub_client_new(const struct hub_ref *name, const struct hub_options *o,
                                  struct error *err);
void hub_client_free(struct hub_client *c);
/* The listing of the repository at the name's revision. */
json_t *hub_client_list(struct hub_client *c, struct error *err);
/*
 * Downloads `f` at `commit` into the file `partial`, and continues an earlier download. On OK the
 * file has the right size and hash and is flushed to the disk. `on_progress` is called with each
 * change of the number of transferred bytes; the change is negative when bytes are discarded.
 */
typedef void (*hub_progress_fn)(void *ctx, const struct hub_file *f, int64_t change);
int hub_client_download(struct hub_client *c, const char *commit, const struct hub_file *f,
                        const char *partial, hub_progress_fn on_progress, void *ctx,
                        struct error *err);

/* Appends a text with percent-encoding: "a b/c" as "a%20b%2Fc"; with keep_slashes '/' is not
 * encoded. */
void hub_url_encode(struct buf *out, const char *text, bool keep_slashes);

/* Whether an address belongs to the public internet: neither this machine, nor a private or
 * link-local network, nor a group of machines. An IPv6 address that contains an IPv4 address is
 * public if that one is. */
struct sockaddr;
bool address_is_public(const struct sockaddr *a);

#endif
