/*
 * fitness_eval: the fitness function of a run. Candidates answer the generation's questions in
 * multi-LoRA batches; performance, cooperation and novelty are computed from these answers.
 *
 * All candidates of a generation get the same questions (in a race, a candidate that is eliminated
 * gets no more), so that the difficulty of a question cancels. The questions depend on the recipe
 * and the generation only.
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

json_t *evolve_cost_json(const struct evolve_cost *c) {
    return json_pack("{s:I,s:I,s:f}", "forward_tokens", (json_int_t)c->forward_tokens,
                     "trained_tokens", (json_int_t)c->trained_tokens, "flops", c->flops);
}

/* questions */

/* A task of the recipe: a family, or a file. The hash of a question in a file assigns the question
 * to fitness or to the test, so that no seed moves a question between the two. */
struct task_source {
    char *name;
    int family; /* -1: a file */
    struct eval_task bank;
    struct task_item *items; /* [bank.n] */
    uint32_t *indices[2];    /* indices of items for fitness, and for the test, in a seeded order */
    int n_indices[2];
    struct task_source *next;
};

static bool is_test_item(const struct task_item *it) {
    return hash_fnv1a(it->question, strlen(it->question)) & 1;
}

static int source_split(struct task_source *s, uint64_t seed, struct error *err) {
    for (int k = 0; k < 2; k++)
        s->indices[k] = xcalloc((size_t)s->bank.n_questions + 1, sizeof *s->indices[k]);
    for (int64_t i = 0; i < s->bank.n_questions; i++) {
        int k = is_test_item(&s->items[i]);
        if (s->items[i].n_choices < 2)
            return error_set(
                err, ERR_USAGE,
                "'%s': question %lld has no choices; fitness needs answers that can be "
                "chosen",
                s->name, (long long)i + 1);
        s->indices[k][s->n_indices[k]++] = (uint32_t)i;
    }
    for (int k = 0; k < 2; k++) {
        struct rng rng = rng_make(seed, RNG_SHUFFLE, (uint32_t)k, 0);
        rng_shuffle(&rng, s->indices[k], (size_t)s->n_indices[k]);
    }
    if (s->n_indices[0] && s->n_indices[1]) return OK;
    return error_set(err, ERR_USAGE, "'%s' has too few questions to split between fitness and test",
                     s->name);
}

static int source_open(struct evolve_run *r, const char *name, struct error *err) {
    struct task_source *s = xcalloc(1, sizeof *s);
    const struct eval_task_options o = {.split = SPLIT_TEST, .seed = 1};
    s->name = xstrdup(name);
    s->family = family_find(name);
    s->next = r->sources;
    r->sources = s;
    if (s->family >= 0) return family_check_questions(s->family, err);
    char *path = r->env->find(name);
    int rc = eval_task_open(&s->bank, path, &o, err);
    if (rc == OK) s->items = eval_task_items(&s->bank);
    if (rc == OK) rc = source_split(s, 1, err);
    free(path);
    return rc;
}

static const struct task_source *source_find(const struct evolve_run *r, const char *name) {
    const struct task_source *s = r->sources;
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
    for (struct task_source *s; (s = r->sources);) {
        r->sources = s->next;
        task_items_release(s->items, s->bank.n_questions);
        eval_task_release(&s->bank);
        for (int k = 0; k < 2; k++) free(s->indices[k]);
        free(s->name);
        free(s);
    }
}

static struct task_item item_copy(const struct task_item *it) {
    struct task_item c = {.n_choices = it->n_choices, .correct = it->correct, .lang = it->lang};
    c.question = xstrdup(it->question);
    c.key = xstrdup(it->question);
    for (int i = 0; i < it->n_choices; i++) c.choices[i] = xstrdup(it->choices[i]);
    if (it->check_question) c.check_question = xstrdup(it->check_question);
    if (it->check_answer) c.check_answer = xstrdup(it->check_answer);
    return c;
}

int evolve_run_count_items(const struct evolve_run *r, const struct strings *tasks,
                           enum data_split split, int64_t n) {
    for (int i = 0; i < tasks->n; i++) {
        const struct task_source *s = source_find(r, tasks->v[i]);
        if (s->family < 0) n = MIN(n, (int64_t)s->n_indices[split == SPLIT_TEST] * tasks->n);
    }
    return (int)n;
}

struct task_item *evolve_run_task_items(const struct evolve_run *r, const struct strings *tasks,
                                        enum data_split split, uint64_t seed, uint32_t begin,
                                        int n) {
    struct task_item *v = xcalloc((size_t)n + 1, sizeof *v);
    for (int i = 0; i < n; i++) {
        const struct task_source *s = source_find(r, tasks->v[i % tasks->n]);
        uint32_t index = begin + (uint32_t)(i / tasks->n);
        int k = split == SPLIT_TEST;
        if (s->family >= 0)
            family_item(s->family, split, seed, index, false, &v[i]);
        else
            v[i] = item_copy(&s->items[s->indices[k][index % (uint32_t)s->n_indices[k]]]);
    }
    return v;
}

/* The evaluation of one generation: its questions and answers [n][n_items], which are zero where a
 * candidate did not answer. */
struct generation_eval {
    struct evolve_run *r;
    const struct evolve_recipe *o;
    struct candidate *c;
    int generation;
    int n, n_team; /* n: all candidates; n_team: without the re-evaluated parents */
    struct task_item *items;
    int n_items;
    struct agent_answer *answers;
    char **texts;    /* [n][n_items] generated texts, or NULL */
    int *n_answered; /* [n] number of items answered */
};

struct task_item *evolve_run_generation_items(const struct evolve_run *r, int generation, int *n) {
    const struct evolve_recipe *o = evolve_run_recipe_at(r, generation);
    *n = evolve_run_count_items(r, &o->tasks, SPLIT_DEV, o->fitness.items);
    int per_task = (*n + o->tasks.n - 1) / o->tasks.n;
    uint32_t begin = o->fitness.resample_items ? (uint32_t)generation * (uint32_t)per_task : 0;
    return evolve_run_task_items(r, &o->tasks, SPLIT_DEV, (uint64_t)o->seed, begin, *n);
}

static double candidate_flops(const struct evolve_run *r, const struct candidate *c) {
    double flops = evolve_run_token_flops(r, c->adapter);
    for (int k = 0; !c->adapter && k < c->n_mix; k++) flops += lora_flops(c->mix[k].adapter);
    return flops;
}

enum { CALLS_PER_BATCH = 8192 };

/* The seed of samples: the same for all candidates. */
static uint64_t item_seed(const struct generation_eval *t, int item) {
    struct rng rng =
        rng_make((uint64_t)t->o->seed, RNG_SAMPLE, (uint32_t)t->generation, (uint32_t)item);
    return rng_u64(&rng) >> 11; // exact as a double, as other seeds of calls
}

/* The candidates which[n_which] answer the items [from, to). */
static int answer_items(struct generation_eval *t, const int *which, int n_which, int from, int to,
                        struct error *err) {
    int n = to - from, rc = OK;
    struct llm_call *calls = xcalloc((size_t)n_which * (size_t)n + 1, sizeof *calls);
    struct chat_message(*chats)[2] = xcalloc((size_t)n_which * (size_t)n + 1, sizeof *chats);
    struct agent *agents = xcalloc((size_t)n_which + 1, sizeof *agents);
    for (int k = 0; k < n_which; k++) {
        agents[k] = candidate_agent(&t->c[which[k]]);
        for (int i = 0; i < n; i++) {
            struct llm_call *call = &calls[k * n + i];
            *call = llm_call_question(&agents[k], &t->items[from + i], -1, chats[k * n + i]);
            call->chain_of_thought = t->o->chain_of_thought;
            call->max_tokens = (int32_t)t->o->max_tokens;
            call->temperature = agents[k].temperature;
            call->seed = item_seed(t, from + i);
        }
    }
    for (int begin = 0; rc == OK && begin < n_which * n; begin += CALLS_PER_BATCH) {
        rc = evolve_run_check_pause(t->r, err);
        if (rc == OK)
            rc = t->r->llm_client.ask(t->r->llm_client.ctx, calls + begin,
                                      MIN(CALLS_PER_BATCH, n_which * n - begin), err);
    }
    for (int j = 0; j < n_which * n; j++) {
        struct llm_call *call = &calls[j];
        size_t index = (size_t)which[j / n] * (size_t)t->n_items + (size_t)(from + j % n);
        if (rc == OK && call->failed) /* it has no choice to count */
            rc = error_set(err, ERR_USAGE, "question %d, candidate '%s': %s", from + j % n,
                           t->c[which[j / n]].name, call->failed);
        t->answers[index] = call->answer;
        if (t->texts) t->texts[index] = xstrdup(call->text ? call->text : "");
        evolve_cost_add_forward(t->r, call->n_prefilled + call->n_generated,
                                candidate_flops(t->r, &t->c[which[j / n]]));
        llm_call_release(call);
    }
    for (int k = 0; k < n_which; k++) t->n_answered[which[k]] = to;
    free(agents);
    free(chats);
    free(calls);
    return rc;
}

static double item_score(const struct generation_eval *t, int i, int item) {
    const struct agent_answer *a = &t->answers[(size_t)i * (size_t)t->n_items + (size_t)item];
    int right = t->items[item].correct;
    return strcmp(t->o->fitness.metric, "right") == 0 ? a->choice == right : (double)a->prob[right];
}

/* Evaluates by racing: an eliminated candidate gets no further items. */
static int answer_items_by_race(struct generation_eval *t, struct error *err) {
    struct race_options o = t->o->race;
    if (o.budget > 0)
        o.budget = MAX(o.budget, t->n); // the recipe's check does not count re-evaluated parents
    struct race *race = race_new(&o, t->n, t->n_items, err);
    int *candidates = xcalloc((size_t)t->n, sizeof *candidates), from, to, n,
        rc = race ? OK : err->code;
    while (rc == OK && (n = race_next(race, candidates, &from, &to)) > 0) {
        double *scores = xcalloc((size_t)n * (size_t)(to - from), sizeof *scores);
        rc = answer_items(t, candidates, n, from, to, err);
        for (int j = 0; rc == OK && j < n * (to - from); j++)
            scores[j] = item_score(t, candidates[j / (to - from)], from + j % (to - from));
        if (rc == OK) race_add_scores(race, scores);
        free(scores);
    }
    free(candidates);
    race_free(race);
    return rc;
}

static int answer_all_items(struct generation_eval *t, struct error *err) {
    int *which = xcalloc((size_t)t->n + 1, sizeof *which);
    for (int i = 0; i < t->n; i++) which[i] = i;
    int rc = answer_items(t, which, t->n, 0, t->n_items, err);
    free(which);
    return rc;
}

/* performance, cooperation, novelty */

static void fill_scores(struct generation_eval *t, struct evaluation *out) {
    out->n_items = t->n_items;
    out->scores = xcalloc((size_t)t->n * (size_t)t->n_items + 1, sizeof *out->scores);
    for (int i = 0; i < t->n; i++) {
        double *scores = out->scores + (size_t)i * (size_t)t->n_items;
        for (int k = 0; k < t->n_items; k++)
            scores[k] = k < t->n_answered[i] ? item_score(t, i, k) : NAN;
        t->c[i].n_items = t->n_answered[i];
        t->c[i].performance = stats_mean_interval(scores, t->n_answered[i]);
    }
}

/* Contribution of candidate i to the vote with one partner of each other role: the role's first
 * candidate. Elites come first, sorted by fitness, so the partner is the best of its role in the
 * last generation if an elite has that role. */
static struct stats_interval role_contribution(const struct generation_eval *t, int i,
                                               uint8_t *with, uint8_t *without) {
    const struct vote *v = vote_find(t->o->vote);
    int partners[MAX_POPULATION], n = 0;
    bool has_partner[MAX_POPULATION] = {false};
    has_partner[t->c[i].role] = true;
    for (int j = 0; j < t->n_team; j++) {
        if (has_partner[t->c[j].role]) continue;
        has_partner[t->c[j].role] = true;
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
    return stats_contribution(with, without, t->n_items);
}

enum { SHAPLEY_PERMUTATIONS = 64 }; /* permutations that estimate Shapley values */

static int shapley(struct generation_eval *t, struct stats_interval *contribution,
                   struct error *err) {
    struct vote_game v = {.vote = vote_find(t->o->vote),
                          .answers = t->answers,
                          .items = t->items,
                          .n_agents = t->n_team,
                          .n_items = t->n_items};
    struct coalition_game g = vote_game(&v);
    struct contribution w[MAX_POPULATION];
    int rc = OK;
    if (t->n_team > GAME_MAX_EXACT_AGENTS) {
        rc = contribution_sampled(&g, SHAPLEY_PERMUTATIONS, (uint64_t)t->o->seed, w, err);
    } else {
        uint8_t *right = xcalloc((size_t)t->n_items << t->n_team, 1);
        rc = coalition_game_play_all(&g, right, err);
        if (rc == OK) contribution_exact(right, t->n_team, t->n_items, w);
        free(right);
    }
    for (int i = 0; rc == OK && i < t->n_team; i++) contribution[i] = w[i].shapley;
    return rc;
}

static void role_contributions(const struct generation_eval *t,
                               struct stats_interval *contribution) {
    uint8_t *with = xcalloc(2 * (size_t)t->n_items + 1, 1);
    for (int i = 0; i < t->n_team; i++)
        contribution[i] = role_contribution(t, i, with, with + t->n_items);
    free(with);
}

static int fill_cooperation(struct generation_eval *t, struct error *err) {
    struct stats_interval contribution[MAX_POPULATION];
    int rc = OK;
    if (t->o->evolve.roles)
        role_contributions(t, contribution);
    else if (strcmp(t->o->fitness.credit, "shapley") == 0)
        rc = shapley(t, contribution, err);
    else
        contribution_leave_one_out_vote(vote_find(t->o->vote), t->answers, t->n_team, t->items,
                                        t->n_items, contribution);
    for (int i = 0; rc == OK && i < t->n_team; i++) t->c[i].cooperation = contribution[i];
    return rc;
}

/* Embeddings of the chains of thought; a text that several candidates wrote is embedded once. */
struct text_embeddings {
    char **text;       /* [n][n_items] borrowed from generation_eval */
    int *vector_index; /* [n][n_items] */
    float *v;          /* [distinct][d] */
    int32_t d;
    int n_items;
};

static int compare_texts(const void *a, const void *b) {
    return strcmp(**(char **const *)a, **(char **const *)b);
}

/* Stores the distinct texts in texts[] and, for each of the n texts, the index of its distinct text
 * in vector_index[]. Returns the number of distinct texts. */
static int texts_deduplicate(struct text_embeddings *w, size_t n, const char **texts) {
    char ***order = xcalloc(n + 1, sizeof *order);
    int distinct = 0;
    for (size_t i = 0; i < n; i++) order[i] = &w->text[i];
    qsort(order, n, sizeof *order, compare_texts);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(*order[i], *order[i - 1]) != 0) texts[distinct++] = *order[i];
        w->vector_index[order[i] - w->text] = distinct - 1;
    }
    free(order);
    return distinct;
}

static int texts_embed(struct text_embeddings *w, struct generation_eval *t, struct error *err) {
    struct engine_embedder engine_embedder = {
        .engine = t->r->engine, .model = t->r->model, .max_len = engine_max_len(t->r->engine)};
    struct embedder e;
    size_t n = (size_t)t->n * (size_t)t->n_items;
    const char **texts = xcalloc(n + 1, sizeof *texts);
    w->vector_index = xcalloc(n + 1, sizeof *w->vector_index);
    int distinct = texts_deduplicate(w, n, texts), rc = embedder_open(&e, &engine_embedder, err);
    w->d = rc == OK ? e.d : 0;
    w->v = xcalloc((size_t)distinct * (size_t)w->d + 1, sizeof *w->v);
    if (rc == OK) rc = e.embed(e.ctx, texts, distinct, w->v, err);
    free(texts);
    return rc;
}

/* (1 - cosine) / 2 of the embeddings of candidates a and b; 0 to 1. */
static double embedding_distance(const void *ctx, int a, int b, int item) {
    const struct text_embeddings *w = ctx;
    int x = w->vector_index[a * w->n_items + item], y = w->vector_index[b * w->n_items + item];
    if (x == y) return 0;
    double cosine =
        cosine_similarity(w->v + (size_t)x * (size_t)w->d, w->v + (size_t)y * (size_t)w->d, w->d);
    return fmin(1, fmax(0, (1 - cosine) / 2));
}

static int fill_novelty(struct generation_eval *t, struct evaluation *out, struct error *err) {
    struct behaviour_answers answers = {t->answers, t->items, t->n_items};
    struct text_embeddings embeddings = {.text = t->texts, .n_items = t->n_items};
    struct stats_interval *novelty = xcalloc((size_t)t->n + 1, sizeof *novelty);
    const char *metric = t->o->fitness.distance;
    bool uses_texts = strcmp(metric, "embedding") == 0;
    int rc = uses_texts ? texts_embed(&embeddings, t, err) : OK;
    out->distance = xcalloc((size_t)t->n * (size_t)t->n + 1, sizeof *out->distance);
    if (rc == OK)
        behaviour_novelty(uses_texts                  ? embedding_distance
                          : strcmp(metric, "js") == 0 ? behaviour_js_divergence
                                                      : behaviour_disagreement,
                          uses_texts ? (const void *)&embeddings : &answers, t->n, t->n_team,
                          t->n_items, novelty, out->distance);
    for (int i = 0; rc == OK && i < t->n; i++) t->c[i].novelty = novelty[i];
    free(embeddings.vector_index);
    free(embeddings.v);
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
        int majority_choice = vote_decide(majority, team, t->n_team, n_choices);
        for (int i = 0; i < t->n; i++) {
            double entropy = 0;
            for (int j = 0; j < n_choices; j++) {
                double p = (double)team[i].prob[j];
                if (p > 0) entropy -= p * math_log(p) / math_log(n_choices);
            }
            t->c[i].descriptor[0] += entropy / t->n_items;
            t->c[i].descriptor[1] += (double)(team[i].choice == majority_choice) / t->n_items;
        }
    }
}

int evolve_run_evaluate(void *ctx, int generation, struct candidate *c, int n, int n_reevaluated,
                        struct evaluation *out, struct error *err) {
    struct evolve_run *r = ctx;
    struct generation_eval t = {.r = r,
                                .o = evolve_run_recipe_at(r, generation),
                                .generation = generation,
                                .c = c,
                                .n = n,
                                .n_team = n - n_reevaluated,
                                .n_answered = xcalloc((size_t)n + 1, sizeof *t.n_answered)};
    bool recompute = r->replay_generation == generation;
    struct store *store = r->engine_client.store;
    t.items = evolve_run_generation_items(r, generation, &t.n_items);
    t.answers = xcalloc((size_t)n * (size_t)t.n_items + 1, sizeof *t.answers);
    for (int i = 0; i < n; i++)
        c[i].descriptor[0] = c[i].descriptor[1] = 0,
        c[i].cooperation = c[i].novelty = (struct stats_interval){0};
    if (strcmp(t.o->fitness.distance, "embedding") == 0)
        t.texts = xcalloc((size_t)n * (size_t)t.n_items + 1, sizeof *t.texts);
    if (recompute) r->engine_client.store = NULL;
    int rc = t.o->fitness.race ? answer_items_by_race(&t, err) : answer_all_items(&t, err);
    r->engine_client.store = store;
    if (rc == OK) fill_scores(&t, out);
    bool is_complete = rc == OK && !t.o->fitness.race;
    if (is_complete) rc = fill_cooperation(&t, err);
    if (is_complete && rc == OK) rc = fill_novelty(&t, out, err);
    if (is_complete) fill_descriptors(&t);
    task_items_release(t.items, t.n_items);
    for (int i = 0; t.texts && i < n * t.n_items; i++) free(t.texts[i]);
    free(t.texts);
    free(t.answers);
    free(t.n_answered);
    return rc;
}
