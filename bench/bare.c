/*
 * bare: the load of bench/load.c applied to the engine directly, without a server, threads or HTTP.
 *
 *   build/bare MODEL STREAMS SECONDS MEAN_TOKENS MAX_LEN ADAPTER [ADAPTER …]
 *
 * The conversations, the adapters and the JSON output are the same, and each stream sends one
 * request after another. Here the next request of a stream is submitted before the following engine
 * step, which no client of a server can achieve.
 */
#include "adapter/adapter.h"
#include "engine/engine.h"
#include "tally.h"

struct stream {
    struct engine_request request;
    struct token_ids prompt;
    int number;
    int32_t n_tokens;
    double sent_at, first, last;
};
static struct model *m;
static struct engine *e;
static struct adapter *adapters[256];
static int n_adapters, mean_tokens;
static uint64_t n_requests;
static struct tally tally;

static void or_die(int rc, const struct error *err) {
    if (rc == OK) return;
    fprintf(stderr, "bare: %s\n", err->text);
    exit(1);
}

static void request_submit(struct stream *s) {
    struct error err;
    char text[64];
    snprintf(text, sizeof text, "%llu + %d = ?", (unsigned long long)++n_requests % 900,
             s->number % 90);
    s->sent_at = clock_now();
    engine_request_release(&s->request);
    s->prompt.n = 0;
    or_die(
        chat_encode(m->tok, &(struct chat_message){"user", text}, 1, true, &s->prompt, NULL, &err),
        &err);
    s->request = (struct engine_request){.prompt = s->prompt.v,
                                         .n_prompt = (int32_t)s->prompt.n,
                                         .adapter = adapters[s->number % n_adapters],
                                         .sampling = {.temperature = 1, .top_p = 1, .seed = 1},
                                         .max_tokens = tally_reply_length(n_requests, mean_tokens)};
    s->n_tokens = 0;
    s->last = 0;
    or_die(engine_submit(e, &s->request, &err), &err);
}

/* Counts new tokens and submits the next request when one is finished; returns whether the stream
 * continues. */
static bool stream_update(struct stream *s, double now) {
    if (s->n_tokens < s->request.n_out) {
        tally_add_token(&tally, now, s->sent_at, s->last);
        if (s->last == 0) s->first = now;
        s->last = now;
        s->n_tokens = s->request.n_out;
    }
    if (!s->request.done) return true;
    tally_add_reply(&tally, s->first, now, s->request.n_out);
    if (now >= tally.began + tally.seconds) return false;
    request_submit(s);
    return true;
}

static void run_streams(struct stream **v, int n) {
    for (int i = 0; i < n; i++) request_submit(v[i]);
    while (n > 0) {
        engine_step(e);
        double now = clock_now();
        for (int i = 0; i < n; i++)
            while (i < n && !stream_update(v[i], now)) v[i] = v[--n];
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
    run_streams(v, n);
    tally_print(&tally, n, 0);
    return 0;
}
