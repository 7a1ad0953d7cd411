/*
 * libshoal: many LoRA agents on one small language model, in a program of your own.
 *
 * Ownership. What shoal_*_open, _load and _new return is yours until the matching _close or _free.
 * Strings that come back in a result belong to the result. A failed call returns NULL or a negative
 * code and leaves a message in the error you passed (which may be NULL). Threads. A model and
 * adapters may be shared by all threads; a shoal is driven by one thread at a time. Sameness. A
 * reply is a function of the model, the adapter's content, the prompt and the settings: not of the
 * other requests in the batch, nor of threads.
 *
 * Link with -lshoal -ljansson -lyaml -lpcre2-8 -lsqlite3 -lsodium -lm -pthread; examples/choose.c
 * and examples/world.c are whole programs.
 */
#ifndef SHOAL_H
#define SHOAL_H

#ifdef __cplusplus
extern "C" {
#endif

#define SHOAL_API __attribute__((visibility("default")))

struct shoal;         /* a model with a running batch */
struct shoal_adapter; /* an immutable LoRA adapter */

struct shoal_error {
    int code; /* 0 or negative */
    char text[2048];
};

SHOAL_API const char *shoal_version(void);

/* Opens a GGUF file or a Hugging Face directory. threads 0: all processors. exact: the same bits on
 * every processor. */
SHOAL_API struct shoal *shoal_open(const char *model, int threads, int exact,
                                   struct shoal_error *err);
SHOAL_API void shoal_close(struct shoal *s);

/* A PEFT directory or a GGUF LoRA file made for this model. */
SHOAL_API struct shoal_adapter *shoal_adapter_load(struct shoal *s, const char *dir,
                                                   struct shoal_error *err);
SHOAL_API void shoal_adapter_free(struct shoal_adapter *a);
SHOAL_API const char *
shoal_adapter_hash(const struct shoal_adapter *a); /* SHA-256 of its content, 64 hex digits */

/* One request of a batch. Zero-initialise; set `user` and what you need. */
struct shoal_request {
    const char *system, *user;           /* chat; system may be NULL */
    const struct shoal_adapter *adapter; /* NULL: the bare model */
    int max_tokens;                      /* of free text; ignored with choices */
    float temperature;                   /* 0: greedy */
    unsigned long long seed;
    const char *const *choices; /* answer with one of these instead, NULL for free text */
    int n_choices;              /* at most 64 */

    /* results, freed by shoal_request_release */
    char *text;         /* free text, NUL-terminated UTF-8 as far as the model wrote such */
    float *probability; /* [n_choices] exact, adds up to 1 */
    int choice;         /* the most probable */
    int n_prefilled, n_generated; /* tokens */
};
/* Runs all requests as one batch in which every row has its own adapter. 0 or a negative code. */
SHOAL_API int shoal_run(struct shoal *s, struct shoal_request *requests, int n,
                        struct shoal_error *err);
SHOAL_API void shoal_request_release(struct shoal_request *r);

/*
 * The grid world (docs/WORLD.md). A world belongs to one thread at a time, needs no model, and is a
 * function of its rules, its seed and the actions. Agents are numbered from 0.
 */
struct shoal_world;

enum shoal_action {
    SHOAL_MOVE_NORTH,
    SHOAL_MOVE_SOUTH,
    SHOAL_MOVE_EAST,
    SHOAL_MOVE_WEST,
    SHOAL_PICK_FOOD,
    SHOAL_DROP_FOOD,
    SHOAL_ACTIONS /* with a channel to talk: action + SHOAL_ACTIONS · word */
};

struct shoal_agent {
    int alive, x, y, energy; /* north is y + 1 */
    int holds;               /* 0 nothing, 1 food, 2 material */
    int steps, collected, delivered, built, blocked, bites;
    double reward, total, fitness; /* of the last step; of its life */
};

/* rules: "repaired" (NULL is that), "seed" or a YAML file; agents: 1 to 64. At tick 0. */
SHOAL_API struct shoal_world *shoal_world_new(const char *rules, int agents,
                                              unsigned long long seed, struct shoal_error *err);
SHOAL_API void shoal_world_free(struct shoal_world *w);
/* Tick 0 of another seed, from 0 to 2^63 - 1. 0 or a negative code. */
SHOAL_API int shoal_world_reset(struct shoal_world *w, unsigned long long seed,
                                struct shoal_error *err);
/* actions: [agents]; those of the dead are not looked at. On an error nothing has changed. */
SHOAL_API int shoal_world_step(struct shoal_world *w, const int *actions, struct shoal_error *err);
SHOAL_API int shoal_world_tick(const struct shoal_world *w);
SHOAL_API int shoal_world_living(const struct shoal_world *w); /* how many */
SHOAL_API int shoal_world_agent(const struct shoal_world *w, int agent, struct shoal_agent *out,
                                struct shoal_error *err);
/* What an agent sees, what a model is asked, and the map: the world's own text, until the same
 * function is called again. NULL: no such agent. */
SHOAL_API const char *shoal_world_observe(struct shoal_world *w, int agent);
SHOAL_API const char *shoal_world_prompt(struct shoal_world *w, int agent);
SHOAL_API const char *shoal_world_draw(struct shoal_world *w);
/* The action that a written answer means; -1: none. */
SHOAL_API int shoal_world_parse(const struct shoal_world *w, const char *text);
/* Everything as JSON text, to be freed by free(); and back, in this or another world. */
SHOAL_API char *shoal_world_state(const struct shoal_world *w);
SHOAL_API int shoal_world_restore(struct shoal_world *w, const char *state,
                                  struct shoal_error *err);

#ifdef __cplusplus
}
#endif
#endif
