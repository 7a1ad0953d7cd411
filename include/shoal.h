/*
 * libshoal: many LoRA agents on one small language model, as a library.
 *
 * Ownership. The caller owns every result of shoal_open, shoal_adapter_load and shoal_world_new
 * until the matching _close or _free. Errors. A failed call with a `struct shoal_error` returns
 * NULL or a negative code and leaves a message in the error (which may be NULL). Threads. Threads
 * may share adapters; one thread at a time uses a struct shoal or a struct shoal_world.
 * Reproducibility. A reply depends only on the model, the adapter's content, the prompt and the
 * settings and, unless `exact` is set, on the processor. It does not depend on the other requests
 * in the batch or on the number of threads.
 *
 * Link with -lshoal -ljansson -lyaml -lpcre2-8 -lsqlite3 -lsodium -lunistring -lm -pthread;
 * examples/choose.c and examples/world.c are complete programs.
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

/* Opens a GGUF file or a Hugging Face directory. threads: 0 for all processors that this process
 * may use. exact: not 0 for results that are equal on every processor, to the last bit. */
SHOAL_API struct shoal *shoal_open(const char *model, int threads, int exact,
                                   struct shoal_error *err);
SHOAL_API void shoal_close(struct shoal *s);

/* Loads a PEFT directory or a GGUF LoRA file made for this model. */
SHOAL_API struct shoal_adapter *shoal_adapter_load(struct shoal *s, const char *dir,
                                                   struct shoal_error *err);
SHOAL_API void shoal_adapter_free(struct shoal_adapter *a);
SHOAL_API const char *
shoal_adapter_hash(const struct shoal_adapter *a); /* SHA-256 of its content, 64 hex digits */

/* One request of a batch. Zero-initialise it; set `user` and the other fields as needed. */
struct shoal_request {
    const char *system, *user;           /* chat; system may be NULL */
    const struct shoal_adapter *adapter; /* NULL: the base model */
    int max_tokens;                      /* limit of free text; ignored with choices */
    float temperature;                   /* 0: greedy */
    unsigned long long seed;
    const char *const *choices; /* the reply is one of these texts; NULL: free text */
    int n_choices;              /* at most 64 */

    /* results, freed by shoal_request_release */
    char *text; /* free text, NUL-terminated; UTF-8 unless the model generated other bytes */
    float *probability; /* [n_choices] exact probabilities of the choices, adding up to 1 */
    int choice;         /* index of the most probable choice */
    int n_prefilled, n_generated; /* tokens */
};
/* Runs all requests as one batch, each with the adapter that it names. 0, with the results set, or
 * a negative code, without results. */
SHOAL_API int shoal_run(struct shoal *s, struct shoal_request *requests, int n,
                        struct shoal_error *err);
SHOAL_API void shoal_request_release(struct shoal_request *r);

/*
 * The grid world (docs/WORLD.md). A world needs no model. Its state depends only on its rules, its
 * number of agents, its seed and the actions. Agents are numbered from 0.
 */
struct shoal_world;

enum shoal_action {
    SHOAL_MOVE_NORTH,
    SHOAL_MOVE_SOUTH,
    SHOAL_MOVE_EAST,
    SHOAL_MOVE_WEST,
    SHOAL_PICK_FOOD,
    SHOAL_DROP_FOOD,
    SHOAL_ACTIONS /* number of actions; an action that also says word w, from 1: action +
                     SHOAL_ACTIONS * w */
};

struct shoal_agent {
    int alive, x, y, energy; /* north is y + 1 */
    int holds;               /* 0 nothing, 1 food, 2 material */
    int steps, collected, delivered, built, blocked, bites;
    double reward, total, fitness; /* reward of the last step; total and fitness of the episode */
};

/* rules: "repaired" (also for NULL), "legacy" or a YAML file; agents: 1 to 64. Starts at tick 0. */
SHOAL_API struct shoal_world *shoal_world_new(const char *rules, int agents,
                                              unsigned long long seed, struct shoal_error *err);
SHOAL_API void shoal_world_free(struct shoal_world *w);
/* Restarts at tick 0 with a seed from 0 to 2^63 - 1. 0 or a negative code. */
SHOAL_API int shoal_world_reset(struct shoal_world *w, unsigned long long seed,
                                struct shoal_error *err);
/* actions: [agents]; those of dead agents are ignored. On an error nothing changes. */
SHOAL_API int shoal_world_step(struct shoal_world *w, const int *actions, struct shoal_error *err);
SHOAL_API int shoal_world_tick(const struct shoal_world *w);
SHOAL_API int shoal_world_living(const struct shoal_world *w); /* number of living agents */
SHOAL_API int shoal_world_agent(const struct shoal_world *w, int agent, struct shoal_agent *out,
                                struct shoal_error *err);
/* Texts: an agent's observation, its prompt for a model, and the map of the world. The world owns
 * each text, which is valid until the next call of the same function. NULL: no such agent. */
SHOAL_API const char *shoal_world_observe(struct shoal_world *w, int agent);
SHOAL_API const char *shoal_world_prompt(struct shoal_world *w, int agent);
SHOAL_API const char *shoal_world_draw(struct shoal_world *w);
/* Parses a model's answer; returns the action, or -1 if the text is not an action. */
SHOAL_API int shoal_world_parse(const struct shoal_world *w, const char *text);
/* shoal_world_state returns the whole state as JSON text, which the caller frees with free().
 * shoal_world_restore puts a world into such a state, which may be that of another world; on an
 * error nothing changes. */
SHOAL_API char *shoal_world_state(const struct shoal_world *w);
SHOAL_API int shoal_world_restore(struct shoal_world *w, const char *state,
                                  struct shoal_error *err);

#ifdef __cplusplus
}
#endif
#endif
