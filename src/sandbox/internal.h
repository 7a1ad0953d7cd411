/* internal: what the files of the sandbox share. */
#ifndef SHOAL_SANDBOX_INTERNAL_H
#define SHOAL_SANDBOX_INTERNAL_H

#include "sandbox/sandbox.h"

/* The path of bwrap; NULL, ERR_MISSING: there is none. malloc'ed. */
char *bwrap_find(struct error *err);
/* What may have to be changed here for bwrap to work, as the end of a sentence, or "". */
const char *bwrap_hint(void);

/* Descriptors as the launched bwrap has them. */
enum {
    BWRAP_FD_SECCOMP = 3, /* it reads the seccomp filter to its end, when all else is set up */
    BWRAP_FD_ARGS, /* its options, each ending with NUL: they hold the environment, as ps must not
                    */
    N_FDS,
};

/* The limits with their defaults. */
struct sandbox_limits sandbox_limits_with_defaults(const struct sandbox_limits *l);

/* The options of bwrap. `mapped`: the caller has made the user namespace. */
int bwrap_args_build(const struct sandbox_spec *s, const struct sandbox_limits *l, bool mapped,
                     struct buf *out, struct error *err);
/* OK: the program exists, as far as can be seen from outside. */
int sandbox_program_check(const struct sandbox_spec *s, struct error *err);
/* The value of NAME=VALUE in a list, the last one of several; NULL: none. */
const char *env_value(const struct strings *env, const char *name);

/* A file in memory with these bytes, read from its start; -1 and `err`. */
int memfd_from_bytes(const void *p, size_t n, struct error *err);
/* The seccomp filter; one that allows everything where the architecture is not known. */
#define SECCOMP_FILTER_MAX 4096
size_t seccomp_filter(uint8_t out[SECCOMP_FILTER_MAX]);

/* Whether sandbox_confine has succeeded here. */
bool sandbox_is_confined(void);

#endif
