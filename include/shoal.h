/*
 * libshoal: many LoRA agents on one small language model, as a library: load, generate, embed,
 * train, evaluate, debate, evolve, run a world, serve. examples/ has a complete program for each.
 *
 * Ownership. Each object belongs to the caller until the function that frees it: _close, _free or
 * _stop. An object borrows the objects and texts that it was made from; they must outlive it,
 * except where a comment says "copied". A `char *` result is JSON text, which the caller frees with
 * shoal_free; a `const char *` result belongs to the object. NULL may be freed.
 *
 * Errors. A failed call returns NULL or a negative enum shoal_code and fills `err`, which may be
 * NULL. After an error the objects are unchanged. If the system has no memory for a small
 * allocation, or the program itself has a bug, the process ends; nothing else ends it.
 *
 * Options are a list of texts "name=value" that ends with NULL; NULL: all defaults. Names, values
 * and defaults are those of the program's flags (docs/COMMANDS.md), such as "r=8" or
 * "kv-cache-dtype=i8". A list option is given once for each item, another option once. An unknown
 * name or an invalid value is SHOAL_ERR_USAGE.
 *
 * Threads. One thread at a time may use an object; different threads may use different objects, and
 * share adapters. A call uses the threads of the model's option "threads". The library writes
 * nothing to stdout or stderr, and changes no signal handler and no environment variable.
 *
 * Reproducibility. A result depends only on the model, the adapters' contents, the inputs and the
 * seed and, unless the option "exact" is set, on the processor's level. It does not depend on the
 * number of threads or on other requests of the same batch.
 *
 * Build with the output of: pkg-config --cflags --libs shoal
 */
#ifndef SHOAL_H
#define SHOAL_H

#ifdef __cplusplus
extern "C" {
#endif

#define SHOAL_API __attribute__((visibility("default")))

struct shoal;            /* a model with its engine */
struct shoal_adapter;    /* an immutable LoRA adapter */
struct shoal_request;    /* a chat or a text to continue */
struct shoal_trainer;    /* adapters in training */
struct shoal_population; /* adapters in evolution */
struct shoal_world;      /* a grid world */
struct shoal_server;     /* a server that runs */

/* errors, results, progress */

enum shoal_code {
    SHOAL_OK = 0,
    SHOAL_ERR_USAGE = -1,    /* an argument or an option is wrong */
    SHOAL_ERR_IO = -2,       /* the system refused a file operation */
    SHOAL_ERR_FORMAT = -3,   /* a file or a text does not follow its format */
    SHOAL_ERR_MISMATCH = -4, /* valid, but made for something else */
    SHOAL_ERR_MEMORY = -5,   /* does not fit the memory or a fixed limit */
    SHOAL_ERR_MISSING = -6,  /* a file or a name does not exist */
    SHOAL_ERR_STATE = -7,    /* not possible now; or cancelled by a callback */
    SHOAL_ERR_NUMERIC = -8   /* NaN or infinity where a number is needed */
};
struct shoal_error {
    int code; /* enum shoal_code */
    char text[2048];
};
SHOAL_API const char *shoal_version(void);
SHOAL_API const char *shoal_error_name(int code); /* "usage" */
SHOAL_API void shoal_free(void *p);

struct shoal_progress {
    const char *task;      /* "training" */
    long long done, total; /* steps; total 0: not known */
    double seconds;        /* since the task began */
    const char *detail;    /* such as the loss; "" if there is none */
};
/* Called on the thread of the call. Each function may be NULL, and so may a struct
 * shoal_callbacks. */
struct shoal_callbacks {
    /* After each step. Not 0 cancels: the call fails with SHOAL_ERR_STATE. */
    int (*progress)(void *ctx, const struct shoal_progress *p);
    void (*message)(void *ctx, const char *text); /* notes and warnings */
    void *ctx;
};

/* models */

/* Opens a GGUF file or a Hugging Face directory. Options: threads (0: all processors), exact,
 * fast, kv-cache-dtype, lora-dtype, max-num-seqs (64 sequences at once), max-model-len (tokens per
 * sequence; more than the model's context is SHOAL_ERR_USAGE). max-model-len 0 is that context, or
 * as much of it as one sequence can have in half of the available memory, at least 1024 tokens.
 * The engine is fitted into the available memory, before the model is loaded; SHOAL_ERR_MEMORY:
 * one sequence does not fit. */
SHOAL_API struct shoal *shoal_open(const char *model, const char *const *options,
                                   struct shoal_error *err);
SHOAL_API void shoal_close(struct shoal *s);
/* {name, hash, architecture, parameters, layers, width, vocabulary, max_seq_len, class, level,
 * threads} */
SHOAL_API char *shoal_info(struct shoal *s, struct shoal_error *err);
/* Writes the token ids of a text to out[max]; returns the number of tokens of the whole text, which
 * may be larger. Special tokens are not recognised in the text. */
SHOAL_API int shoal_tokenize(const struct shoal *s, const char *text, int *out, int max);
/* The text of tokens, NUL-terminated; it may be cut inside of a UTF-8 character. */
SHOAL_API char *shoal_detokenize(const struct shoal *s, const int *tokens, int n,
                                 struct shoal_error *err);

/* adapters */

/* Loads a PEFT directory or a GGUF LoRA file made for this model. */
SHOAL_API struct shoal_adapter *shoal_adapter_load(struct shoal *s, const char *path,
                                                   struct shoal_error *err);
/* An untrained adapter, which changes nothing. Options: those of `shoal train` that describe an
 * adapter (r, lora-alpha, target, layers …), and seed. */
SHOAL_API struct shoal_adapter *shoal_adapter_new(struct shoal *s, const char *const *options,
                                                  struct shoal_error *err);
/* Merges, crosses or mutates adapters by an operator of `shoal adapter operators`. weights [n] may
 * be NULL: 1/n each. Options: rank, step, seed. */
SHOAL_API struct shoal_adapter *shoal_adapter_combine(struct shoal *s, const char *operator_name,
                                                      const struct shoal_adapter *const *adapters,
                                                      const float *weights, int n,
                                                      const char *const *options,
                                                      struct shoal_error *err);
/* Writes a PEFT directory, which must not exist or be an adapter. */
SHOAL_API int shoal_adapter_save(struct shoal *s, const struct shoal_adapter *a, const char *dir,
                                 struct shoal_error *err);
SHOAL_API const char *
shoal_adapter_hash(const struct shoal_adapter *a); /* SHA-256 of its content, 64 hex digits */
/* The lineage: how the adapter was made, {operator, parents, …}; {} if that is not known. */
SHOAL_API char *shoal_adapter_lineage(const struct shoal_adapter *a);
/* Another reference to the adapter, to be freed like the first: keeps an adapter of a population.
 */
SHOAL_API struct shoal_adapter *shoal_adapter_retain(const struct shoal_adapter *a);
SHOAL_API void shoal_adapter_free(struct shoal_adapter *a);

/* generation */

struct shoal_message {
    const char *role, *content; /* role: "system", "user" or "assistant" */
};
/*
 * shoal_request_new: a chat, in the model's chat template, whose next message is to be generated.
 * shoal_request_new_text: a text to continue. Texts are copied. Options: max-tokens (256),
 * temperature (0: greedy), top-k, top-p, min-p, repeat-penalty, seed, stop (a list of texts that
 * end the reply), json-schema, grammar (GBNF) or regex (a text, which the reply must follow).
 */
SHOAL_API struct shoal_request *shoal_request_new(struct shoal *s,
                                                  const struct shoal_message *messages, int n,
                                                  const char *const *options,
                                                  struct shoal_error *err);
SHOAL_API struct shoal_request *shoal_request_new_text(struct shoal *s, const char *text,
                                                       const char *const *options,
                                                       struct shoal_error *err);
SHOAL_API void shoal_request_free(struct shoal_request *r);
/* Uses one adapter, or the weighted sum of several (at most 16). weights [n] may be NULL: 1 each.
 * Without this call, or with n = 0, the base model replies. */
SHOAL_API int shoal_request_set_adapters(struct shoal_request *r,
                                         const struct shoal_adapter *const *adapters,
                                         const float *weights, int n, struct shoal_error *err);
/* The reply is one of these texts (2 to 64, copied), chosen by exact probabilities, without
 * sampling; max-tokens does not apply. */
SHOAL_API int shoal_request_set_choices(struct shoal_request *r, const char *const *choices, int n,
                                        struct shoal_error *err);

/* Runs requests as one batch, each with its adapters. After an error no request has results. */
SHOAL_API int shoal_run(struct shoal *s, struct shoal_request *const *requests, int n,
                        const struct shoal_callbacks *callbacks, struct shoal_error *err);
/*
 * The same, step by step: shoal_submit adds a request, at any time; shoal_step runs one step of all
 * unfinished requests, at most one token for each, and returns the number of unfinished requests;
 * shoal_cancel ends a request with the text so far. A request is submitted once, and must not be
 * freed before it is finished or cancelled.
 */
SHOAL_API int shoal_submit(struct shoal *s, struct shoal_request *r, struct shoal_error *err);
SHOAL_API int shoal_step(struct shoal *s, struct shoal_error *err);
SHOAL_API void shoal_cancel(struct shoal *s, struct shoal_request *r);

/* Results. shoal_request_text: the reply, also while it grows; valid until the next step. UTF-8
 * unless the model generated other bytes; never cut inside of a character before the end. */
SHOAL_API const char *shoal_request_text(struct shoal_request *r);
/* "" (not finished), "stop", "length", "choice", "loop" or "cancelled" */
SHOAL_API const char *shoal_request_finish(const struct shoal_request *r);
/* The index of the most probable choice, or -1; probabilities [n_choices] (may be NULL) add up to
 * 1. */
SHOAL_API int shoal_request_choice(const struct shoal_request *r, float *probabilities);
struct shoal_usage {
    int prompt_tokens, cached_tokens, completion_tokens; /* cached: prompt tokens from the cache */
};
SHOAL_API struct shoal_usage shoal_request_usage(const struct shoal_request *r);

/* embeddings */

/* out [n][shoal_embedding_size]: the mean over a text's tokens of the last hidden states. adapter
 * NULL: the base model. */
SHOAL_API int shoal_embedding_size(const struct shoal *s);
SHOAL_API int shoal_embed(struct shoal *s, const char *const *texts, int n,
                          const struct shoal_adapter *adapter, float *out, struct shoal_error *err);

/* training */

/*
 * `shoal train` as a call: trains adapters on files, compares them with the version before and
 * publishes them; an adapter that is not better is saved in another folder, with published: false.
 * Options: those of the command, data and out required. An interrupted training continues. Result:
 * a list of {adapter, dir, hash, first_loss, last_loss, published, effect: {samples, before,
 * after, replies}, …}; with rewards also first_reward and last_reward, of dpo last_accuracy.
 */
SHOAL_API char *shoal_train(struct shoal *s, const char *const *options,
                            const struct shoal_callbacks *callbacks, struct shoal_error *err);

/*
 * Training step by step. The trainer has copies of n adapters (from shoal_adapter_new, or trained)
 * and trains each on its own samples. shoal_trainer_add adds the gradient of a conversation whose
 * assistant messages are the targets: `weight` is a factor of its loss, 1 for supervised learning
 * or an advantage for policy gradients. shoal_trainer_update applies the optimizer to all that was
 * added since the last update, and sets *loss (may be NULL) to the mean loss per target token.
 * After SHOAL_ERR_NUMERIC the gradients since the last update are lost. Options: those of `shoal
 * train` for the optimizer (optim, weight-decay, max-grad-norm …), lora-dropout, max-length, seed.
 */
SHOAL_API struct shoal_trainer *shoal_trainer_new(struct shoal *s,
                                                  const struct shoal_adapter *const *adapters,
                                                  int n, const char *const *options,
                                                  struct shoal_error *err);
SHOAL_API void shoal_trainer_free(struct shoal_trainer *t);
SHOAL_API int shoal_trainer_add(struct shoal_trainer *t, int adapter,
                                const struct shoal_message *messages, int n, double weight,
                                struct shoal_error *err);
SHOAL_API int shoal_trainer_update(struct shoal_trainer *t, double learning_rate, double *loss,
                                   struct shoal_error *err);
/* The mean loss per target token of a conversation, in nats, without training. */
SHOAL_API int shoal_trainer_loss(struct shoal_trainer *t, int adapter,
                                 const struct shoal_message *messages, int n, double *loss,
                                 struct shoal_error *err);
/* A copy of an adapter in its present state. */
SHOAL_API struct shoal_adapter *shoal_trainer_adapter(struct shoal_trainer *t, int adapter,
                                                      struct shoal_error *err);
/* The complete state, for exact continuation: the same options, adapters and model are needed. */
SHOAL_API int shoal_trainer_save(struct shoal_trainer *t, const char *path,
                                 struct shoal_error *err);
SHOAL_API int shoal_trainer_load(struct shoal_trainer *t, const char *path,
                                 struct shoal_error *err);

/* evaluation and debate */

/*
 * `shoal eval` as a call, for the base model and n adapters: a list of {task, adapter, n, acc, lo,
 * hi, difference: {value, lo, hi, p, p_holm, …}, …}, in which the base model comes first and the
 * others are compared with it. names [n]. Options: tasks, data, n, shots, split, seed,
 * chain-of-thought.
 */
SHOAL_API char *shoal_evaluate(struct shoal *s, const struct shoal_adapter *const *adapters,
                               const char *const *names, int n, const char *const *options,
                               const struct shoal_callbacks *callbacks, struct shoal_error *err);
/*
 * `shoal debate` as a call, with n agents: adapters [n] (NULL: the base model), names [n]. Options:
 * topic with choices (an item each) or tasks with n, data and shots; personas (an item per agent),
 * protocol, rounds, vote, grader, chain-of-thought, max-tokens, temperature, max-seconds, samples,
 * credit, seed. Result: the transcript of the topic, or a report for each task.
 */
SHOAL_API char *shoal_debate(struct shoal *s, const struct shoal_adapter *const *adapters,
                             const char *const *names, int n, const char *const *options,
                             const struct shoal_callbacks *callbacks, struct shoal_error *err);

/* evolution */

/*
 * `shoal evolve` as a call: runs a recipe, and keeps everything in the folder of its run. Options:
 * runs (folder, "runs"), id, seed, threads, exact, fast. A cancelled run is paused;
 * shoal_evolve_resume (options: runs, threads) continues it with the same result. Result: {run,
 * adapters, generations, table, comparisons, …}.
 */
SHOAL_API char *shoal_evolve(const char *recipe, const char *const *options,
                             const struct shoal_callbacks *callbacks, struct shoal_error *err);
SHOAL_API char *shoal_evolve_resume(const char *id, const char *const *options,
                                    const struct shoal_callbacks *callbacks,
                                    struct shoal_error *err);

/*
 * Evolution step by step, with the caller's fitness. A population begins with n founders and their
 * names (copied). shoal_population_evaluate calls `fitness` once with all candidates: it sets
 * scores [n_candidates][n_items], each from 0 to 1, the same items for all candidates; not 0 ends
 * the call with SHOAL_ERR_STATE. The candidates are then sorted, fittest first.
 * shoal_population_breed replaces them by the next generation: elites and children. A child's
 * parents that are not elites are candidates of the next evaluation too. Options: seed, and those
 * of the section "evolve" of a recipe (docs/EVOLUTION.md) for selection and breeding: population,
 * elites, rank, crossovers, mutations, selection …
 */
typedef int (*shoal_fitness_fn)(void *ctx, int n_candidates,
                                const struct shoal_adapter *const *adapters,
                                const char *const *names, int n_items, double *scores);
SHOAL_API struct shoal_population *shoal_population_new(struct shoal *s,
                                                        const struct shoal_adapter *const *founders,
                                                        const char *const *names, int n,
                                                        const char *const *options,
                                                        struct shoal_error *err);
SHOAL_API void shoal_population_free(struct shoal_population *p);
SHOAL_API int shoal_population_evaluate(struct shoal_population *p, shoal_fitness_fn fitness,
                                        void *ctx, int n_items, struct shoal_error *err);
SHOAL_API int shoal_population_breed(struct shoal_population *p, struct shoal_error *err);
SHOAL_API int shoal_population_size(const struct shoal_population *p);
/* Candidate i: its name, and an adapter that the population owns until the next generation. NULL:
 * no such candidate. */
SHOAL_API const char *shoal_population_name(const struct shoal_population *p, int i);
SHOAL_API const struct shoal_adapter *shoal_population_adapter(const struct shoal_population *p,
                                                               int i);
/* The generation after its evaluation: {generation, candidates: [{name, parents, operator,
 * fitness, …}], diversity, operators}; NULL before it. */
SHOAL_API char *shoal_population_info(const struct shoal_population *p);

/*
 * The grid world (docs/WORLD.md). A world needs no model. Its state depends only on its rules, its
 * number of agents, its seed and the actions. Agents are numbered from 0.
 */

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
/* Restarts at tick 0 with a seed from 0 to 2^63 - 1. */
SHOAL_API int shoal_world_reset(struct shoal_world *w, unsigned long long seed,
                                struct shoal_error *err);
/* actions: [agents]; those of dead agents are ignored. */
SHOAL_API int shoal_world_step(struct shoal_world *w, const int *actions, struct shoal_error *err);
/* actions [agents]: what a scripted policy (rule, reflex, random or mock) does now. */
SHOAL_API int shoal_world_policy(struct shoal_world *w, const char *policy, int *actions,
                                 struct shoal_error *err);
SHOAL_API int shoal_world_agents(const struct shoal_world *w); /* number of agents, dead or alive */
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
/* The whole state as JSON, and back; a state may be that of another world. */
SHOAL_API char *shoal_world_state(const struct shoal_world *w);
SHOAL_API int shoal_world_restore(struct shoal_world *w, const char *state,
                                  struct shoal_error *err);

/*
 * `shoal world MODEL` as a call: agents of the model live, learn and breed for some generations in
 * a folder of runs. Options: those of the command for a simulation (world and its rules, agents,
 * steps, adapter, runs, out, generations, num-adapters, seed …). An interrupted simulation
 * continues. Result: a list of {policy, held_out} for baselines and {generation, decisions,
 * held_out, …} for generations.
 */
SHOAL_API char *shoal_simulate(struct shoal *s, const char *const *options,
                               const struct shoal_callbacks *callbacks, struct shoal_error *err);

/* serving */

/*
 * Serves the model and its adapters over HTTP (docs/API.md), on threads of its own, until
 * shoal_server_stop. Options: those of `shoal serve` for the server (host, port, adapter,
 * adapter-dir, team, state, api-key …), not those of shoal_open; jobs are not available. While the
 * server runs, other calls with `s` fail with SHOAL_ERR_STATE, and the process reads regular files
 * only, because paths come from requests.
 */
SHOAL_API struct shoal_server *shoal_serve(struct shoal *s, const char *const *options,
                                           struct shoal_error *err);
SHOAL_API const char *shoal_server_url(const struct shoal_server *v); /* "http://127.0.0.1:8000" */
/* The file of the start-up token, which changes of the server need. */
SHOAL_API const char *shoal_server_token_file(const struct shoal_server *v);
/* Refuses new requests, lets running ones finish for the option drain-seconds, cuts the rest off,
 * and frees the server. */
SHOAL_API void shoal_server_stop(struct shoal_server *v);

#ifdef __cplusplus
}
#endif
#endif
