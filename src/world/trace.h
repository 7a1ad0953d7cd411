/*
 * trace: the life of one world as what was done in it, in memory and as a file.
 *
 * A world is a function of its rules, its seed and the actions, so a trace is those three and every
 * tick of it can be entered. The file is JSON lines:
 *
 *   {"shoal_world":1,"rules":{…},"agents":20,"seed":7,"steps":500,"policy":"rule"}
 *   {"tick":1,"actions":[0,5,-1,…]}                 an action an agent, -1: it is dead
 *   {"tick":100,"actions":[…],"hash":"…"}           world_hash after every hundredth tick
 *   {"end":500,"hash":"…"}                          closed by who wrote it
 *
 * A trace that was forked off another one holds that one's ticks too and says "fork": TICK. Each
 * line is handed to the system when its tick is over, so a crash loses the line it was writing.
 * Reading plays the world along: what could not have been done, or does not give the hash, is an
 * error that names the line or the tick. A file without its end is given as far as it goes.
 */
#ifndef SHOAL_WORLD_TRACE_H
#define SHOAL_WORLD_TRACE_H

#include "world/world.h"

enum { TRACE_TICKS = 1000000, TRACE_HASH_INTERVAL = 100 /* ticks from one hash to the next */ };

struct trace {
    struct world_rules rules; /* its own copy */
    int n_agents;
    uint64_t seed;
    int64_t steps;    /* planned */
    char *policy;     /* who acted */
    int64_t fork;     /* where it left the trace that it came from; -1: it is nobody's fork */
    int16_t *actions; /* [n_ticks][n_agents], -1 of the dead */
    int64_t n_ticks, cap;
    bool closed; /* its end was read */
};

/* The rules as one mapping of their keys, which world_rules_parse reads as it reads YAML. */
json_t *world_rules_json(const struct world_rules *r);
/* Rules from such a mapping; `what` names it in errors. */
int world_rules_from_json(struct world_rules *r, const char *what, const json_t *v,
                          struct error *err);

/* Release a trace whatever the functions return that fill one. */
int trace_init(struct trace *t, const struct world_rules *r, int n_agents, uint64_t seed,
               int64_t steps, const char *policy, struct error *err);
void trace_release(struct trace *t);
/* Actions of the next tick. Those of the dead, which nobody looks at, become -1. */
int trace_append(struct trace *t, const struct world *w, const int16_t *actions, struct error *err);
/* Makes `w` the world at that tick, from 0 to n_ticks; a later one than w's own costs the ticks
 * between. `w` is of this trace, or zero-initialised. */
void trace_seek(const struct trace *t, struct world *w, int64_t tick);
/* Forgets what came after that tick. */
void trace_truncate(struct trace *t, int64_t tick);

int trace_load(struct trace *t, const char *path, struct error *err);
/* The same of a text; `what` names it. */
int trace_parse(struct trace *t, const char *what, const char *text, size_t len, struct error *err);

/* Header and the ticks that there are; later ones follow by trace_write_tick, then trace_close. */
FILE *trace_create(const struct trace *t, const char *path, struct error *err);
/* The trace's last tick, after which the world is `w`. */
int trace_write_tick(const struct trace *t, const struct world *w, FILE *f, struct error *err);
/* Writes the end and closes in every case. */
int trace_close(const struct world *w, FILE *f, struct error *err);

/* The whole as one JSON object, for handing it over: the header, "actions": a list a tick, "hash"
 * of the last one. */
json_t *trace_json(const struct trace *t, const struct world *w);
/* Strictly the same back. */
int trace_from_json(struct trace *t, const json_t *v, struct error *err);

#endif
