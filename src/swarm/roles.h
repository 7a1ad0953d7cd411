/*
 * roles: who the agents of a team are, by what is asked.
 *
 * Constant tables and pure functions; any thread.
 */
#ifndef SHOAL_ROLES_H
#define SHOAL_ROLES_H

#include "memory/memory.h"

enum question_type {
    QUESTION_DISCUSSION,
    QUESTION_PLANNING,
    QUESTION_INFORMATIONAL,
    QUESTION_CONVERSATIONAL,
    QUESTION_DEFAULT,
    N_QUESTION_TYPES
};
extern const char *const question_type_names[N_QUESTION_TYPES]; /* "discussion" … "default" */
int question_type_find(const char *name);                       /* -1 when unknown */
/*
 * The first type, in the order above, with a keyword in the question. Latin keywords are whole
 * words, and Chinese questions have keywords of their own. `compat`: the predecessor's keywords
 * only, anywhere in the lower-cased text ("this" says "hi").
 */
enum question_type question_classify(const char *question, bool compat);

struct agent_role {
    const char *name;        /* "批判的思考AI" */
    const char *description; /* for a system prompt: one or two sentences */
    float temperature;
};
int agent_role_count(enum question_type t);
/* Agent i plays role i mod n. */
struct agent_role agent_role_get(enum question_type t, enum language l, int agent);

#endif
