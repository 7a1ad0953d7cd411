/*
 * bare: the load of bench/load.c on the engine itself, without threads or HTTP.
 *
 *   build/bare MODEL STREAMS SECONDS MEAN_TOKENS MAX_LEN ADAPTER [ADAPTER …]
 *
 * The conversations and adapters are the same, each stream sends one request after another, and the
 * output is the same JSON object. The next request replaces a finished one before the following
 * engine step, which no client can do.
 */
#include "adapter/adapter.h"
#include "engine/engine.h"
#include "tally.h"

struct stream {
    struct engine_request request;
    struct token_ids prompt;
    int number;
    int32_t seen;
    double sent, first, last;
};
static struct model *m;
static struct engine *e;
static struct adapter *adapters[256];
static int n_adapters, mean_tokens;
static uint64_t asked_so_far;
static struct tally tally;

static void or_die(int rc, const struct error *err) {
    if (rc == OK) return;
    fprintf(stderr, "bare: %s\n", err->text);
    exit(1);
}

static void ask(struct stream *s) {
    struct error err;
    char text[64];
    snprintf(text, sizeof text, "%llu + %d = ?", (unsigned long long)++asked_so_far % 900,
             s->number % 90);
    s->sent = clock_now();
    engine_request_release(&s->request);
    s->prompt.n = 0;
    or_die(
        chat_encode(m->tok, &(struct chat_message){"user", text}, 1, true, &s->prompt, NULL, &err),
        &err);
    s->request = (struct engine_request){.prompt = s->prompt.v,
                                         .n_prompt = (int32_t)s->prompt.n,
                                         .adapter = adapters[s->number % n_adapters],
                                         .sampling = {.temperature = 1, .top_p = 1, .seed = 1},
                                         .max_tokens = tally_length(asked_so_far, mean_tokens)};
    s->seen = 0;
    s->last = 0;
    or_die(engine_submit(e, &s->request, &err), &err);
}

/* Counts new tokens; returns whether the stream continues. */
static bool look(struct stream *s, double now) {
    if (s->seen < s->request.n_out) {
        tally_words(&tally, now, s->sent, s->last);
        if (s->last == 0) s->first = now;
        s->last = now;
        s->seen = s->request.n_out;
    }
    if (!s->request.done) return true;
    tally_reply(&tally, s->first, now, s->request.n_out);
    if (now >= tally.began + tally.seconds) return false;
    ask(s);
    return true;
}

static void drive(struct stream **v, int n) {
    for (int i = 0; i < n; i++) ask(v[i]);
    while (n > 0) {
        engine_step(e);
        double now = clock_now();
        for (int i = 0; i < n; i++)
            while (i < n && !look(v[i], now)) v[i] = v[--n];
    }
}

int main(int argc, char **argv) {
    struct error err = {0};
    if (argc < 7 || argc > 6 + 256) {
        fprintf(stderr, "usage: bare MODEL STREAMS SECONDS MEAN_TOKENS MAX_LEN ADAPTER …\n");
        return 2;
    }
    int n = atoi(argv[2]);
    mean_tokens = atoi(argv[4]);
    m = model_open(argv[1], NUMERIC_EXACT, &err);
    or_die(m ? OK : err.code, &err);
    for (int i = 6; i < argc; i++) {
        adapters[n_adapters++] = adapter_open(argv[i], m, &err);
        or_die(adapters[n_adapters - 1] ? OK : err.code, &err);
    }
    struct engine_options o = {.max_seqs = n, .max_len = atoi(argv[5]), .pool = pool_new(0)};
    e = engine_new(m, &o, &err);
    or_die(e ? OK : err.code, &err);
    struct stream **v = xcalloc((size_t)n, sizeof(struct stream *));
    for (int i = 0; i < n; i++) {
        v[i] = xcalloc(1, sizeof *v[i]);
        v[i]->number = i;
    }
    tally = tally_new(clock_now(), atof(argv[3]));
    drive(v, n);
    tally_print(&tally, n, 0);
    return 0;
}
