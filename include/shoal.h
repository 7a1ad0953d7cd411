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
 * is a whole program.
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

#ifdef __cplusplus
}
#endif
#endif
