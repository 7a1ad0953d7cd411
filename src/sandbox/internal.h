/* sandbox: declarations shared by the files of the sandbox. */
#ifndef SHOAL_SANDBOX_INTERNAL_H
#define SHOAL_SANDBOX_INTERNAL_H

#include "sandbox/sandbox.h"

/* The path of bwrap, malloc'ed; NULL with ERR_MISSING if it is not installed. */
char *bwrap_find(struct error *err);
/* The end of an error message: a setting of the system that may prevent bwrap from working, and its
 * change. */
const char *bwrap_hint(void);

/* Descriptors in the launched bwrap. */
enum {
    BWRAP_FD_SECCOMP =
        3,         /* bwrap reads the seccomp filter to its end once everything else is set up */
    BWRAP_FD_ARGS, /* bwrap's options, each ending with NUL; they hold the environment, which must
                      not appear in ps */
    N_FDS,
};

/* The limits with the default in place of each 0. */
struct sandbox_limits sandbox_limits_with_defaults(const struct sandbox_limits *l);

/* Appends the options of bwrap to `out`, each ending with NUL. `mapped`: under root, where
 * launch_as_root maps the user ids, so bwrap makes no user namespace. */
int bwrap_args_build(const struct sandbox_spec *s, const struct sandbox_limits *l, bool mapped,
                     struct buf *out, struct error *err);
/* OK if the program exists and is executable, as far as this can be checked outside of the sandbox;
 * else ERR_MISSING or ERR_USAGE. */
int sandbox_program_check(const struct sandbox_spec *s, struct error *err);

/* An in-memory file with these bytes, positioned at its start; -1 and `err` on failure. */
int memfd_from_bytes(const void *p, size_t n, struct error *err);
/* Writes the seccomp filter and returns its size in bytes. On an unknown architecture it allows
 * everything. */
#define SECCOMP_FILTER_MAX 4096
size_t seccomp_filter(uint8_t out[SECCOMP_FILTER_MAX]);

/* Whether sandbox_confine has succeeded in this process. */
bool sandbox_is_confined(void);

#endif
