/*
 * fitness_eval: the fitness function of a run. Candidates answer the generation's questions in
 * multi-LoRA batches; performance, cooperation and novelty are computed from these answers.
 *
 * All candidates of a generation get the same questions, so that the difficulty of a question
 * cancels. The questions depend on the recipe and the generation only.
 */
#include "evolve/run.h"
#include "memory/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* cost */

static double lora_flops(const struct adapter *a) {
    double numbers = 0;
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++)
        numbers += (double)(proj_in(&a->shape, i % N_PROJ) + proj_out(&a->shape, i % N_PROJ)) *
                   a->loras[i].r;
    return 2 * numbers;
}

double evolve_run_token_flops(const struct evolve_run *r, const struct adapter *a) {
    const struct model_config *c = &r->model->config;
    double numbers = (double)c->vocab_size * c->d_model;
    for (int p = 0; p < N_PROJ; p++)
        numbers += (double)proj_in(c, p) * (double)proj_out(c, p) * c->n_layers;
    return 2 * numbers + (a ? lora_flops(a) : 0);
}

void evolve_cost_add_forward(struct evolve_run *r, int64_t tokens, double flops) {
    r->spent.forward_tokens += tokens;
    r->spent.flops += (double)tokens * flops;
}

void evolve_cost_add_training(struct evolve_run *r, double tokens, double flops) {
    r->spent.trained_tokens += (int64_t)tokens;
    r->spent.flops += 2 * tokens * flops;
}

json_t *evolve_cost_json(const struct evolve_run *r) {
    return json_pack("{s:I,s:I,s:f}", "forward_tokens", (json_int_t)r->spent.forward_tokens,
                     "trained_tokens", (json_int_t)r->spent.trained_tokens, "flops",
                     r->spent.flops);
}

/* questions */

/* A task of the recipe: a family, or a file. A hash of each question in a file assigns it to
 * fitness or to the test, so that no seed moves a question between the two. */
struct source {
    char *name;
    int family; /* -1: a file */
    struct eval_task bank;
    struct task_item *items; /* [bank.n] */
    uint32_t *of[2];         /* indices for fitness and test, in a seeded order */
    int n_of[2];
    struct source *next;
};

static bool is_test(const struct task_item *it) {
    return hash_fnv1a(it->question, strlen(it->question)) & 1;
}

static int source_sort(struct source *s, uint64_t seed, struct error *err) {
    for (int k = 0; k < 2; k++) s->of[k] = xcalloc((size_t)s->bank.n + 1, sizeof *s->of[k]);
    for (int64_t i = 0; i < s->bank.n; i++) {
        int k = is_test(&s->items[i]);
        if (s->items[i].n_choices < 2)
            return error_set(
                err, ERR_USAGE,
                "'%s': question %lld has no choices; fitness needs answers that can be "
                "chosen",
                s->name, (long long)i + 1);
        s->of[k][s->n_of[k]++] = (uint32_t)i;
    }
    for (int k = 0; k < 2; k++) {
        struct rng rng = rng_make(seed, RNG_SHUFFLE, (uint32_t)k, 0);
        rng_shuffle(&rng, s->of[k], (size_t)s->n_of[k]);
    }
    if (s->n_of[0] && s->n_of[1]) return OK;
    return error_set(err, ERR_USAGE, "'%s' has too few questions to be parted", s->name);
}

static int source_open(struct evolve_run *r, const char *name, struct error *err) {
    struct source *s = xcalloc(1, sizeof *s);
    const struct eval_task_options o = {.split = SPLIT_TEST, .seed = 1};
    s->name = xstrdup(name);
    s->family = fry_find(name);
    s->next = r->sources;
    r->sources = s;
    if (s->family >= 0) return OK;
    char *path = r->env->find(name);
    int rc = eval_task_open(&s->bank, path, &o, err);
    if (rc == OK) s->items = eval_task_items(&s->bank);
    if (rc == OK) rc = source_sort(s, 1, err);
    free(path);
    return rc;
}

static const struct source *source_find(const struct evolve_run *r, const char *name) {
    const struct source *s = r->sources;
    while (s && strcmp(s->name, name) != 0) s = s->next;
    return s;
}

int evolve_run_open_tasks(struct evolve_run *r, const struct strings *tasks, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < tasks->n; i++)
        if (!source_find(r, tasks->v[i])) rc = source_open(r, tasks->v[i], err);
    return rc;
}

void evolve_run_close_tasks(struct evolve_run *r) {
    for (struct source *s; (s = r->sources);) {
        r->sources = s->next;
        task_items_release(s->items, s->bank.n);
        eval_task_release(&s->bank);
        for (int k = 0; k < 2; k++) free(s->of[k]);
        free(s->name);
        free(s);
    }
}

static struct task_item item_copy(const struct task_item *it) {
    struct task_item c = {.n_choices = it->n_choices, .correct = it->correct, .lang = it->lang};
    c.question = xstrdup(it->question);
    c.key = xstrdup(it->question);
    for (int i = 0; i < it->n_choices; i++) c.choices[i] = xstrdup(it->choices[i]);
    return c;
}

int evolve_run_count_items(const struct evolve_run *r, const struct strings *tasks,
                           enum data_split split, int64_t n) {
    for (int i = 0; i < tasks->n; i++) {
        const struct source *s = source_find(r, tasks->v[i]);
        if (s->family < 0) n = MIN(n, (int64_t)s->n_of[split == SPLIT_TEST] * tasks->n);
    }
    return (int)n;
}

struct task_item *evolve_run_task_items(const struct evolve_run *r, const struct strings *tasks,
                                        enum data_split split, uint64_t seed, uint32_t begin,
                                        int n) {
    struct task_item *v = xcalloc((size_t)n + 1, sizeof *v);
    for (int i = 0; i < n; i++) {
        const struct source *s = source_find(r, tasks->v[i % tasks->n]);
        uint32_t at = begin + (uint32_t)(i / tasks->n);
        int k = split == SPLIT_TEST;
        if (s->family >= 0)
            fry_item(s->family, split, seed, at, false, &v[i]);
        else
            v[i] = item_copy(&s->items[s->of[k][at % (uint32_t)s->n_of[k]]]);
    }
    return v;
}

/* The questions of one generation and their answers, [n][n_items]; an unanswered item has no choice
 * and no probabilities. */
struct generation_eval {
    struct evolve_run *r;
    const struct evolve_recipe *o;
    struct candidate *c;
    int n, n_team; /* number of candidates, with and without witnesses */
    struct task_item *items;
    int n_items;
    struct agent_answer *answers;
    char **texts;    /* [n][n_items] generated texts, or NULL */
    int *n_answered; /* [n] number of items answered */
};

struct task_item *evolve_run_generation_items(const struct evolve_run *r, int generation, int *n) {
    const struct evolve_recipe *o = evolve_run_recipe_at(r, generation);
    *n = evolve_run_count_items(r, &o->tasks, SPLIT_DEV, o->fitness.items);
    int each = (*n + o->tasks.n - 1) / o->tasks.n;
    uint32_t begin = o->fitness.resample_items ? (uint32_t)generation * (uint32_t)each : 0;
    return evolve_run_task_items(r, &o->tasks, SPLIT_DEV, (uint64_t)o->seed, begin, *n);
}

static double candidate_flops(const struct evolve_run *r, const struct candidate *c) {
    double flops = evolve_run_token_flops(r, c->adapter);
    for (int k = 0; !c->adapter && k < c->n_mix; k++) flops += lora_flops(c->mix[k].adapter);
    return flops;
}

enum { ASK_AT_ONCE = 8192 };

/* Candidates `who` answer the items [from, to). */
static int ask(struct generation_eval *t, const int *who, int n_who, int from, int to,
               struct error *err) {
    int n = to - from, rc = OK;
    struct llm_call *calls = xcalloc((size_t)n_who * (size_t)n + 1, sizeof *calls);
    struct chat_message(*chats)[2] = xcalloc((size_t)n + 1, sizeof *chats);
    struct agent *agents = xcalloc((size_t)n_who + 1, sizeof *agents);
    for (int k = 0; k < n_who; k++) {
        const struct candidate *c = &t->c[who[k]];
        bool mixed = !c->adapter;
        agents[k] = (struct agent){.name = c->name,
                                   .adapter = c->adapter,
                                   .mix = mixed ? c->mix : NULL,
                                   .n_mix = mixed ? c->n_mix : 0};
        for (int i = 0; i < n; i++) {
            struct llm_call *call = &calls[k * n + i];
            *call = llm_call_question(&agents[k], &t->items[from + i], -1, chats[i]);
            call->chain_of_thought = t->o->chain_of_thought;
            call->max_tokens = (int32_t)t->o->max_tokens;
        }
    }
    for (int at = 0; rc == OK && at < n_who * n; at += ASK_AT_ONCE) {
        rc = evolve_run_check_pause(t->r, err);
        if (rc == OK)
            rc = t->r->llm_client.ask(t->r->llm_client.ctx, calls + at,
                                      MIN(ASK_AT_ONCE, n_who * n - at), err);
    }
    for (int j = 0; j < n_who * n; j++) {
        struct llm_call *call = &calls[j];
        size_t at = (size_t)who[j / n] * (size_t)t->n_items + (size_t)(from + j % n);
        t->answers[at] = call->answer;
        if (t->texts) t->texts[at] = xstrdup(call->text ? call->text : "");
        evolve_cost_add_forward(t->r, call->n_prefilled + call->n_generated,
                                candidate_flops(t->r, &t->c[who[j / n]]));
        llm_call_release(call);
    }
    for (int k = 0; k < n_who; k++) t->n_answered[who[k]] = to;
    free(agents);
    free(chats);
    free(calls);
    return rc;
}

static double score_of(const struct generation_eval *t, int i, int item) {
    const struct agent_answer *a = &t->answers[(size_t)i * (size_t)t->n_items + (size_t)item];
    int right = t->items[item].correct;
    return strcmp(t->o->fitness.metric, "right") == 0 ? a->choice == right : (double)a->prob[right];
}

/* Eliminated candidates get no further items. */
static int race(struct generation_eval *t, struct error *err) {
    struct race_options o = t->o->race;
    if (o.budget > 0) o.budget = MAX(o.budget, t->n); // witnesses come in addition
    struct race *race = race_new(&o, t->n, t->n_items, err);
    int *who = xcalloc((size_t)t->n, sizeof *who), from, to, n, rc = race ? OK : err->code;
    while (rc == OK && (n = race_next(race, who, &from, &to)) > 0) {
        double *scores = xcalloc((size_t)n * (size_t)(to - from), sizeof *scores);
        rc = ask(t, who, n, from, to, err);
        for (int j = 0; rc == OK && j < n * (to - from); j++)
            scores[j] = score_of(t, who[j / (to - from)], from + j % (to - from));
        if (rc == OK) race_tell(race, scores);
        free(scores);
    }
    free(who);
    race_free(race);
    return rc;
}

static int ask_all(struct generation_eval *t, struct error *err) {
    int *who = xcalloc((size_t)t->n + 1, sizeof *who);
    for (int i = 0; i < t->n; i++) who[i] = i;
    int rc = ask(t, who, t->n, 0, t->n_items, err);
    free(who);
    return rc;
}

/* performance, cooperation, novelty */

static void fill_scores(struct generation_eval *t, struct evaluation *out) {
    out->n_items = t->n_items;
    out->scores = xcalloc((size_t)t->n * (size_t)t->n_items + 1, sizeof *out->scores);
    for (int i = 0; i < t->n; i++) {
        double *row = out->scores + (size_t)i * (size_t)t->n_items;
        for (int k = 0; k < t->n_items; k++)
            row[k] = k < t->n_answered[i] ? score_of(t, i, k) : NAN;
        t->c[i].n_items = t->n_answered[i];
        t->c[i].performance = stats_mean_interval(row, t->n_answered[i]);
    }
}

/* Contribution of candidate i to the vote of the best members of the other roles. Elites come
 * first, sorted by fitness. */
static struct stats_interval role_contribution(const struct generation_eval *t, int i,
                                               uint8_t *with, uint8_t *without) {
    const struct vote *v = vote_find(t->o->vote);
    int partners[MAX_POPULATION], n = 0;
    bool seen[MAX_POPULATION] = {false};
    seen[t->c[i].role] = true;
    for (int j = 0; j < t->n_team; j++) {
        if (seen[t->c[j].role]) continue;
        seen[t->c[j].role] = true;
        partners[n++] = j;
    }
    for (int k = 0; k < t->n_items; k++) {
        struct agent_answer team[MAX_POPULATION + 1];
        const struct task_item *it = &t->items[k];
        for (int j = 0; j < n; j++)
            team[j] = t->answers[(size_t)partners[j] * (size_t)t->n_items + (size_t)k];
        team[n] = t->answers[(size_t)i * (size_t)t->n_items + (size_t)k];
        with[k] = vote_decide(v, team, n + 1, it->n_choices) == it->correct;
        without[k] = n > 0 && vote_decide(v, team, n, it->n_choices) == it->correct;
    }
    return stats_mcnemar(with, without, t->n_items).diff;
}

enum { PERMUTATIONS = 64 }; /* permutations for sampled Shapley values */

static int shapley(struct generation_eval *t, struct stats_interval *worth, struct error *err) {
    struct vote_game v = {.vote = vote_find(t->o->vote),
                          .answers = t->answers,
                          .items = t->items,
                          .n_agents = t->n_team,
                          .n_items = t->n_items};
    struct coalition_game g = vote_game(&v);
    struct contribution w[MAX_POPULATION];
    int rc = OK;
    if (t->n_team > GAME_MAX_EXACT_AGENTS) {
        rc = contribution_sampled(&g, PERMUTATIONS, (uint64_t)t->o->seed, w, err);
    } else {
        uint8_t *right = xcalloc((size_t)t->n_items << t->n_team, 1);
        rc = coalition_game_play_all(&g, right, err);
        if (rc == OK) contribution_exact(right, t->n_team, t->n_items, w);
        free(right);
    }
    for (int i = 0; rc == OK && i < t->n_team; i++) worth[i] = w[i].shapley;
    return rc;
}

static void role_contributions(const struct generation_eval *t, struct stats_interval *worth) {
    uint8_t *with = xcalloc(2 * (size_t)t->n_items + 1, 1);
    for (int i = 0; i < t->n_team; i++) worth[i] = role_contribution(t, i, with, with + t->n_items);
    free(with);
}

static int fill_cooperation(struct generation_eval *t, struct error *err) {
    struct stats_interval worth[MAX_POPULATION];
    int rc = OK;
    if (t->o->evolve.roles)
        role_contributions(t, worth);
    else if (strcmp(t->o->fitness.credit, "shapley") == 0)
        rc = shapley(t, worth, err);
    else
        contribution_leave_one_out_vote(vote_find(t->o->vote), t->answers, t->n_team, t->items,
                                        t->n_items, worth);
    for (int i = 0; rc == OK && i < t->n_team; i++) t->c[i].cooperation = worth[i];
    return rc;
}

/* Embeddings of workings; equal texts of several candidates are embedded once. */
struct text_embeddings {
    char **text; /* [n][n_items] borrowed from generation_eval */
    int *which;  /* [n][n_items] index of the vector */
    float *v;    /* [distinct][d] */
    int32_t d;
    int n_items;
};

static int by_words(const void *a, const void *b) {
    return strcmp(**(char **const *)a, **(char **const *)b);
}

/* Sets which[] by the order of the texts; returns the number of distinct texts, stored in
 * list[]. */
static int words_count(struct text_embeddings *w, size_t n, const char **list) {
    char ***order = xcalloc(n + 1, sizeof *order);
    int distinct = 0;
    for (size_t i = 0; i < n; i++) order[i] = &w->text[i];
    qsort(order, n, sizeof *order, by_words);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(*order[i], *order[i - 1]) != 0) list[distinct++] = *order[i];
        w->which[order[i] - w->text] = distinct - 1;
    }
    free(order);
    return distinct;
}

static int words_embed(struct text_embeddings *w, struct generation_eval *t, struct error *err) {
    struct engine_embedder own = {
        .engine = t->r->engine, .model = t->r->model, .max_len = engine_max_len(t->r->engine)};
    struct embedder e;
    size_t n = (size_t)t->n * (size_t)t->n_items;
    const char **list = xcalloc(n + 1, sizeof *list);
    w->which = xcalloc(n + 1, sizeof *w->which);
    int distinct = words_count(w, n, list), rc = embedder_open(&e, &own, err);
    w->d = rc == OK ? e.d : 0;
    w->v = xcalloc((size_t)distinct * (size_t)w->d + 1, sizeof *w->v);
    if (rc == OK) rc = e.embed(e.ctx, list, distinct, w->v, err);
    free(list);
    return rc;
}

/* (1 - cosine) / 2. */
static double embedding_distance(const void *ctx, int a, int b, int item) {
    const struct text_embeddings *w = ctx;
    int x = w->which[a * w->n_items + item], y = w->which[b * w->n_items + item];
    if (x == y) return 0;
    double cosine =
        cosine_similarity(w->v + (size_t)x * (size_t)w->d, w->v + (size_t)y * (size_t)w->d, w->d);
    return fmin(1, fmax(0, (1 - cosine) / 2));
}

static int fill_novelty(struct generation_eval *t, struct evaluation *out, struct error *err) {
    struct behaviour_answers answers = {t->answers, t->items, t->n_items};
    struct text_embeddings words = {.text = t->texts, .n_items = t->n_items};
    struct stats_interval *novelty = xcalloc((size_t)t->n + 1, sizeof *novelty);
    const char *apart = t->o->fitness.distance;
    bool said = strcmp(apart, "embedding") == 0;
    int rc = said ? words_embed(&words, t, err) : OK;
    out->distance = xcalloc((size_t)t->n * (size_t)t->n + 1, sizeof *out->distance);
    if (rc == OK)
        behaviour_novelty(said                       ? embedding_distance
                          : strcmp(apart, "js") == 0 ? behaviour_js_divergence
                                                     : behaviour_disagreement,
                          said ? (const void *)&words : &answers, t->n, t->n_team, t->n_items,
                          novelty, out->distance);
    for (int i = 0; rc == OK && i < t->n; i++) t->c[i].novelty = novelty[i];
    free(words.which);
    free(words.v);
    free(novelty);
    return rc;
}

/* Behaviour descriptors for the archive: uncertainty (normalised entropy of the answer), and the
 * fraction of items on which the candidate makes the team's most common choice. */
static void fill_descriptors(struct generation_eval *t) {
    const struct vote *majority = vote_find("majority");
    for (int k = 0; k < t->n_items; k++) {
        struct agent_answer team[MAX_CANDIDATES];
        int n_choices = t->items[k].n_choices;
        for (int i = 0; i < t->n; i++) team[i] = t->answers[i * t->n_items + k];
        int common = vote_decide(majority, team, t->n_team, n_choices);
        for (int i = 0; i < t->n; i++) {
            double entropy = 0;
            for (int j = 0; j < n_choices; j++) {
                double p = (double)team[i].prob[j];
                if (p > 0) entropy -= p * math_log(p) / math_log(n_choices);
            }
            t->c[i].descriptor[0] += entropy / t->n_items;
            t->c[i].descriptor[1] += (double)(team[i].choice == common) / t->n_items;
        }
    }
}

int evolve_run_evaluate(void *ctx, int generation, struct candidate *c, int n, int witnesses,
                        struct evaluation *out, struct error *err) {
    struct evolve_run *r = ctx;
    struct generation_eval t = {.r = r,
                                .o = evolve_run_recipe_at(r, generation),
                                .c = c,
                                .n = n,
                                .n_team = n - witnesses,
                                .n_answered = xcalloc((size_t)n + 1, sizeof *t.n_answered)};
    bool recompute = r->only == generation;
    struct store *store = r->engine_client.store;
    t.items = evolve_run_generation_items(r, generation, &t.n_items);
    t.answers = xcalloc((size_t)n * (size_t)t.n_items + 1, sizeof *t.answers);
    for (int i = 0; i < n; i++)
        c[i].descriptor[0] = c[i].descriptor[1] = 0,
        c[i].cooperation = c[i].novelty = (struct stats_interval){0};
    if (strcmp(t.o->fitness.distance, "embedding") == 0)
        t.texts = xcalloc((size_t)n * (size_t)t.n_items + 1, sizeof *t.texts);
    if (recompute) r->engine_client.store = NULL;
    int rc = t.o->fitness.race ? race(&t, err) : ask_all(&t, err);
    r->engine_client.store = store;
    if (rc == OK) fill_scores(&t, out);
    bool whole = rc == OK && !t.o->fitness.race;
    if (whole) rc = fill_cooperation(&t, err);
    if (whole && rc == OK) rc = fill_novelty(&t, out, err);
    if (whole) fill_descriptors(&t);
    task_items_release(t.items, t.n_items);
    for (int i = 0; t.texts && i < n * t.n_items; i++) free(t.texts[i]);
    free(t.texts);
    free(t.answers);
    free(t.n_answered);
    return rc;
}
