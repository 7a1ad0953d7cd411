/*
 * pipe: worlds for other programs, one JSON object a line, in the shape of PettingZoo's Parallel
 * API (docs/WORLD.md has every word of it).
 *
 * There are two directions. A world_server is the environment: a line is asked, a line is
 * answered, and it does no input or output itself. A struct subprocess is another program that plays:
 * it is started, told what the agents see, and answers with actions. One thread at a time for each.
 */
#ifndef SHOAL_WORLD_PIPE_H
#define SHOAL_WORLD_PIPE_H

#include "world/world.h"

enum {
    WORLD_SERVER_MAX_LINE = 64 << 20, /* bytes of a line from outside */
    WORLD_SERVER_MAX_WORLDS = 1024,   /* that a server holds at once */
};

/* What the values of a line may need; its numbers always fit. */
#define WORLD_SERVER_JSON_BOUNDS ((struct json_limits){.depth = 100, .cost = (size_t)1 << 30})

/* Lines from a file descriptor, of any bytes. Zero-initialise but for fd. */
struct line_reader {
    int fd;
    size_t limit; /* bytes of a line */
    struct buf b;
    size_t begin; /* of what was not yet given out */
    bool skip;    /* the rest of a line that was too long */
};
/* 1 and the line without its newline, good until the next call; 0 at the end; ERR_MEMORY for a line
 * above the limit, which is passed over; ERR_STATE when nothing came for `timeout` seconds (0: wait
 * for ever). What stands before the end without a newline is a line too. */
int line_reader_next(struct line_reader *r, double timeout, const char **line, size_t *len,
              struct error *err);
void line_reader_release(struct line_reader *r);

/* The environment. `r` is copied; steps are those of a world that no reset says otherwise of. */
struct world_server;
struct world_server *world_server_new(const struct world_rules *r, int n_agents, int64_t steps,
                                      struct error *err);
void world_server_free(struct world_server *s);
/* Answers a line; adds one line with its newline to `out`, whatever the line was. False once it was
 * asked to close. */
bool world_server_handle(struct world_server *s, const char *line, size_t len, struct buf *out);

/* An action from outside: a number, one's name or free text as a model writes it, or {"action":
 * one of those, "word": N}. *parsed is false where text named no action: it is then the random move
 * of (seed, agent, tick). */
int world_action_read(const struct world *w, const struct world_rules *r, int agent,
                      const json_t *v, int16_t *action, bool *parsed, struct error *err);

/* Another program that plays. */
struct subprocess;
/* Runs `command` by the shell. It is waited for at most `timeout` seconds each time. */
struct subprocess *subprocess_open(const char *command, double timeout, struct error *err);
/* Tells it what the living see and takes what they do: [n_agents]. After an error it is of no use
 * any more. */
int subprocess_act(struct subprocess *o, const struct world *w, const struct world_rules *r,
                int16_t *actions, struct error *err);
/* Closes its input and waits for it to end; kills it after the timeout. */
void subprocess_close(struct subprocess *o);

#endif
