/* shoal debate: agents answer questions together; the debate beside its own first-round vote. */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    struct strings agents;
    char *topic, *tasks, *vote;
    struct strings choices;
    int64_t rounds, n, seed, max_tokens;
    bool working;
};
#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, help }
static const struct option_row rows[] = {
    ROW("agents", OPT_LIST, agents, NULL, 0, 0, "DIR …",
        "PEFT directories; 'base' is the bare model"),
    ROW("topic", OPT_STRING, topic, NULL, 0, 0, "TEXT", "one question"),
    ROW("choices", OPT_LIST, choices, NULL, 0, 0, "TEXT …", "its possible answers"),
    ROW("tasks", OPT_STRING, tasks, NULL, 0, 0, "FAMILY", "questions of a task family instead"),
    ROW("n", OPT_INT, n, "200", 1, 1e6, "N", "how many of them"),
    ROW("rounds", OPT_INT, rounds, "2", 0, 16, "N", "rounds; 0 checks the arguments and stops"),
    ROW("vote", OPT_STRING, vote, "confidence", 0, 0, "NAME",
        "majority, confidence, logprob or borda"),
    ROW("working", OPT_BOOL, working, "true", 0, 0, NULL, "think before answering"),
    ROW("max-tokens", OPT_INT, max_tokens, "24", 1, 4096, "N", "tokens of thinking a turn"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "draws questions and orders"),
    SETUP_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

/* Turns that are asked at once; an item with the answers of all agents to it in one round. */
enum { TURNS_WORK = 32 << 20, ITEM_WORK = 4096 };

struct team {
    struct agent v[16];
    int n;
};

static int team_load(struct team *t, const struct options *o, struct setup *s, struct error *err) {
    if (o->agents.n < 1 || o->agents.n > 16)
        return error_set(err, ERR_USAGE, "--agents wants 1 to 16 adapters");
    for (; t->n < o->agents.n; t->n++) {
        const char *dir = o->agents.v[t->n], *slash = strrchr(dir, '/');
        bool base = strcmp(dir, "base") == 0;
        struct adapter *a = base ? NULL : setup_adapter(s, dir, err);
        if (!base && !a) return err->code;
        t->v[t->n] = (struct agent){.name = slash && slash[1] ? slash + 1 : dir, .adapter = a};
    }
    return OK;
}

static struct item *make_items(const struct options *o, int *n, struct error *err) {
    struct item *v = NULL;
    if (!o->topic == !o->tasks) {
        error_set(err, ERR_USAGE, "give one of --topic TEXT --choices … and --tasks FAMILY");
    } else if (o->tasks) {
        int f = fry_find(o->tasks);
        if (f < 0) return error_set(err, ERR_USAGE, "no task '%s'", o->tasks), NULL;
        *n = (int)o->n;
        v = xcalloc((size_t)*n, sizeof *v);
        for (int i = 0; i < *n; i++)
            fry_item(f, SPLIT_TEST, (uint64_t)o->seed, (uint32_t)i, false, &v[i]);
    } else if (o->choices.n < 2 || o->choices.n > MAX_CHOICES) {
        error_set(err, ERR_USAGE, "--choices wants 2 to %d answers", MAX_CHOICES);
    } else {
        *n = 1;
        v = xcalloc(1, sizeof *v);
        *v = (struct item){.question = xstrdup(o->topic), .n_choices = o->choices.n, .correct = -1};
        for (int i = 0; i < o->choices.n; i++) v->choices[i] = xstrdup(o->choices.v[i]);
    }
    return v;
}

static int64_t count(const uint8_t *right, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += right[i];
    return sum;
}

static void print_line(const struct common *c, const char *name, int round, int64_t right, int n) {
    struct interval ci = stats_wilson(right, n);
    if (c->json)
        cli_print(json_pack("{s:s,s:i,s:i,s:f,s:f,s:f}", "name", name, "round", round, "n", n,
                            "acc", ci.value, "lo", ci.lo, "hi", ci.hi));
    else
        printf("%-24s round %d  %6.1f %%  (%.1f – %.1f, n = %d)\n", name, round, 100 * ci.value,
               100 * ci.lo, 100 * ci.hi, n);
}

static void print_topic(const struct common *c, const struct team *t, const struct item *it,
                        const struct debate *d, const struct vote *v) {
    struct buf b = {0};
    const struct answer *last = d->answers + (size_t)(d->rounds - 1) * (size_t)d->n_agents;
    const char *final = it->choices[vote_decide(v, last, d->n_agents, it->n_choices)];
    debate_transcript(d, t->v, it, 0, v, &b);
    if (c->json)
        cli_print(json_pack("{s:s,s:s}", "transcript", b.data, "answer", final));
    else
        printf("=== Debate Transcript ===\n%sFinal Answer: %s\n", b.data, final);
    buf_release(&b);
}

static void print_tasks(const struct common *c, const struct team *t, const struct debate *d) {
    size_t n = (size_t)d->n_items, last = (size_t)(d->rounds - 1);
    for (int a = 0; a < t->n; a++)
        print_line(c, t->v[a].name, 0, count(d->solo + (size_t)a * n, d->n_items), d->n_items);
    for (int r = 0; r < d->rounds; r++)
        print_line(c, r == 0 ? "first-round vote" : "debate", r,
                   count(d->voted + (size_t)r * n, d->n_items), d->n_items);
    struct paired p = stats_paired(d->voted + last * n, d->voted, d->n_items);
    if (c->json)
        cli_print(json_pack("{s:s,s:f,s:f,s:f,s:f,s:I,s:I}", "compare", "debate - first-round vote",
                            "diff", p.diff.value, "lo", p.diff.lo, "hi", p.diff.hi, "p", p.p,
                            "became_right", (json_int_t)d->flips_good, "became_wrong",
                            (json_int_t)d->flips_bad));
    else
        printf("debate against first-round vote: %+.1f (%+.1f – %+.1f), p = %.2g: %s\n",
               100 * p.diff.value, 100 * p.diff.lo, 100 * p.diff.hi, p.p,
               p.p >= 0.05        ? "not significant"
               : p.diff.value > 0 ? "better"
                                  : "worse");
}

static int debate(const struct common *c, const struct options *o, struct setup *st,
                  const struct item *items, int n, struct error *err) {
    struct team team = {.n = 0};
    struct debate_options dopt = {.rounds = (int)o->rounds,
                                  .working = o->working,
                                  .vote = vote_find(o->vote),
                                  .seed = (uint64_t)o->seed};
    struct debate d = {0};
    if (!dopt.vote) return error_set(err, ERR_USAGE, "no vote '%s'", o->vote);
    int rc = team_load(&team, o, st, err);
    if (rc == OK) rc = setup_engine(st, err);
    struct speaker s = {.engine = st->e, .model = st->m};
    struct asker asker = speaker_asker(&s);
    if (rc == OK && o->rounds == 0)
        printf("[info] Rounds set to 0; skipping debate execution.\n");
    else if (rc == OK)
        rc = debate_run(&asker, team.v, team.n, items, n, &dopt, &d, NULL, err);
    if (rc == OK && d.rounds > 0 && o->topic)
        print_topic(c, &team, items, &d, dopt.vote);
    else if (rc == OK && d.rounds > 0)
        print_tasks(c, &team, &d);
    debate_release(&d);
    return rc;
}

static int run(const struct common *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    int n = 0;
    struct item *items = make_items(o, &n, err);
    if (!items) return err->code;
    struct setup_wants w = {.engine = {.max_rows = 512, .max_seqs = 128, .max_len = 512},
                            .adapters = &o->agents,
                            .work = TURNS_WORK + (size_t)n * ITEM_WORK * (size_t)MAX(1, o->rounds)};
    struct setup s;
    int rc = setup_open(&s, c, &o->setup, args->v[0], &w, err);
    if (rc == OK && s.m) {
        s.engine.max_len = MIN(s.engine.max_len, s.m->config.max_seq_len);
        rc = s.m->tok ? debate(c, o, &s, items, n, err)
                      : error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", s.path);
    }
    rc = setup_close(&s, rc, err);
    for (int i = 0; i < n; i++) item_release(&items[i]);
    free(items);
    return rc;
}

const struct command cmd_debate = {
    .name = "debate",
    .args = "MODEL --agents A B C",
    .summary = "agents answer, hear each other, answer again, and vote",
    .about = "Answers are chosen among the choices with exact probabilities, never parsed. The "
             "vote of the first round is always\n"
             "printed beside the debate.\n\n"
             "  shoal debate models/fry --agents g/critic g/explorer base --tasks route --n 500\n"
             "  shoal debate models/fry --agents g/critic base --topic 'pick the smallest of 4, 9, "
             "2' --choices 4 9 2",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
