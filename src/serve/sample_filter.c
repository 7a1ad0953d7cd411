/*
 * sample_filter: the checks of requests.
 *
 * A request is not trusted: it chooses the pattern or the templates of its check. A match may need
 * 64 MiB and a rendering 32 MiB, which no request reserves. Therefore one such check runs at a
 * time, except while it waits for the base model.
 */
#include "serve/sample_filter.h"

#include "serve/request_fields.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_ITEM = 64 << 10, QUESTION_BYTES = 512 << 10 };

static pthread_mutex_t alone_lock = PTHREAD_MUTEX_INITIALIZER;

/* engine_client.run for the questions of a check. */
static int questions_run(void *ctx, struct engine_request *reqs, int n, struct error *err) {
    struct sample_filter *f = ctx;
    pthread_mutex_unlock(&alone_lock);
    int rc = batcher_run(f->s->batcher, reqs, n, f->stop, err);
    pthread_mutex_lock(&alone_lock);
    return rc;
}

static bool spec_is_allowed(const struct strings *allowed, const char *spec) {
    for (int i = 0; i < allowed->n; i++)
        if (strcmp(allowed->v[i], spec) == 0) return true;
    return false;
}

static struct check *filter_check_open(struct sample_filter *f, const char *spec,
                                       struct error *err) {
    const struct check_options o = {.sandbox = true, .model = &f->model};
    bool confined = check_spec_is_pure(spec);
    f->alone = confined && strcmp(spec, "calculator") != 0;
    if (confined || spec_is_allowed(&f->s->options->checks, spec))
        return check_open_filter(spec, &o, err);
    error_set(err, ERR_USAGE,
              "'check' is '%.80s'; this server takes calculator, regex, regex:PATTERN, question, "
              "and the checks of its --allow-check",
              spec);
    return NULL;
}

/* The item that the check sees; NULL with `err` set. */
static json_t *filter_item(const json_t *given, const char *question, struct error *err) {
    if (given && !json_is_object(given)) {
        error_set(err, ERR_USAGE, "'check_item' must be an object");
        return NULL;
    }
    if (given && json_dumpb(given, NULL, 0, JSON_COMPACT) > MAX_ITEM) {
        error_set(err, ERR_USAGE, "'check_item' is larger than %d bytes", MAX_ITEM);
        return NULL;
    }
    json_t *item = given ? json_copy((json_t *)(uintptr_t)given) : json_object();
    bool has_question = json_object_get(item, "question") || json_object_get(item, "prompt") ||
                        json_object_get(item, "messages");
    /* a longer text is no arithmetic expression, and every sample's line for a command has it */
    if (!has_question && question && strlen(question) <= MAX_ITEM)
        json_object_set_new(item, "question", json_string(question));
    return item;
}

/* The arguments are those of sample_filter_read; `item`: the value of check_item, or NULL. */
static struct sample_filter *filter_open(struct server *s, const char *spec, const json_t *item,
                                         const char *question, const char **field,
                                         struct error *err) {
    struct sample_filter *f = xcalloc(1, sizeof *f);
    f->s = s;
    f->client = (struct engine_client){
        .engine = s->engine, .model = s->model, .run = questions_run, .run_ctx = f};
    f->questioner =
        (struct check_questioner){.client = engine_client_as_llm(&f->client), .agent.name = "base"};
    f->model = check_questioner_as_model(&f->questioner);
    *field = "check";
    f->check = filter_check_open(f, spec, err);
    if (f->check) {
        *field = "check_item";
        f->item = filter_item(item, question, err);
    }
    if (f->item && check_item(f->check, f->item, err) == OK) return f;
    if (f->item) error_wrap(err, "'check_item'");
    sample_filter_free(f);
    return NULL;
}

int sample_filter_read(struct server *s, const json_t *body, const char *question,
                       struct sample_filter **out, int *n_samples, const char **field,
                       struct error *err) {
    const json_t *item = json_get_nonnull(body, "check_item");
    const char *check = NULL;
    int64_t samples = 1;
    *out = NULL;
    if (json_read_string(body, "check", &check, err) != OK ||
        json_read_int(body, "samples", 1, SAMPLE_FILTER_MAX, &samples, err) != OK)
        return err->code;
    if (!check && (samples > 1 || item))
        return error_set(err, ERR_USAGE, "'%s' requires 'check', which selects among samples",
                         item ? "check_item" : "samples");
    if (!check) return OK;
    *out = filter_open(s, check, item, question, field, err);
    if (!*out) return err->code;
    *field = NULL;
    *n_samples = (int)samples;
    return OK;
}

void sample_filter_free(struct sample_filter *f) {
    if (!f) return;
    check_free(f->check);
    json_decref(f->item);
    free(f);
}

size_t sample_filter_bytes(const struct sample_filter *f) {
    return strcmp(check_kind(f->check), "question") == 0 ? QUESTION_BYTES : 0;
}

/* Checks the texts, unless the client has disconnected. */
static int samples_check(struct sample_filter *f, char *const *texts, int n,
                         struct checked_samples *out, struct error *err) {
    *out = (struct checked_samples){0};
    if (f->alone) pthread_mutex_lock(&alone_lock);
    int rc = __atomic_load_n(f->stop, __ATOMIC_ACQUIRE)
                 ? error_set(err, ERR_STATE, "the client has disconnected")
                 : checked_samples_of_texts(f->check, &f->item, 1, n, texts, out, err);
    if (f->alone) pthread_mutex_unlock(&alone_lock);
    return rc;
}

int sample_filter_select(struct sample_filter *f, char *const *texts, int n, const bool *stop) {
    struct checked_samples samples;
    struct error err;
    int selected = 0;
    f->stop = stop;
    f->n_samples = n;
    if (samples_check(f, texts, n, &samples, &err) == OK) {
        selected = MAX(checked_samples_decide(&samples, 0, n, true), 0);
        f->n_passed = (int)check_cost(f->check).passed;
    } else {
        f->error = err;
        /* The request was accepted, so an error is the server's: "overloaded" if the questions
         * could not be answered now, else internal. */
        if (!f->alone || (err.code != ERR_STATE && err.code != ERR_MEMORY)) f->error.code = ERR_IO;
    }
    checked_samples_release(&samples);
    return selected;
}

json_t *sample_filter_json(const struct sample_filter *f) {
    return json_pack("{s:{s:s,s:i,s:i,s:I,s:I,s:I}}", "check", "kind", check_kind(f->check),
                     "samples", f->n_samples, "passed", f->n_passed, "questions",
                     (json_int_t)check_cost(f->check).questions, "prompt_tokens",
                     (json_int_t)f->questioner.prefilled, "completion_tokens",
                     (json_int_t)f->questioner.generated);
}
