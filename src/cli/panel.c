/*
 * panel: opens the team of ask and chat from its options, and closes it.
 *
 * Options of an earlier program are accepted (docs/COMPATIBILITY.md): a note says why an option has
 * no effect, and an option that is not supported is an error.
 */
#define _GNU_SOURCE
#include "cli/panel.h"
#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PANEL_WORK = 32 << 20 };

static double now(void *ctx) {
    (void)ctx;
    return (double)time(NULL);
}

/* flags */

bool panel_names_model(const struct panel_options *o) {
    return o->model_name || o->model_path;
}

static void legacy_flags_note(const struct panel_options *o) {
    if (o->model_type) log_info("--model-type: a model's kind is read from its files");
    if (o->parallel) log_info("--parallel: the agents of an iteration always run as one batch");
    if (o->safe_parallel) log_info("--safe-parallel: one batch needs no lock");
    if (o->max_workers)
        log_info(
            "--max-workers: one batch has no workers; --threads sets the number of processors");
    if (!o->local_files)
        log_info("--no-local-files: nothing is downloaded here; 'shoal pull' does that");
    if (o->log) log_info("--log: the store keeps all messages; --board prints them");
}

static int references_check(const struct panel_options *o, struct error *err) {
    const char *mode = o->rag_mode;
    if (o->zim_path || (mode && strcmp(mode, "zim") == 0))
        return error_set(err, ERR_USAGE,
                         "no ZIM archive is read: take its pages out as HTML, add them with 'shoal "
                         "knowledge add', and name that with --knowledge");
    if (mode && strcmp(mode, "knowledge_base") == 0 && !o->knowledge)
        return error_set(err, ERR_USAGE, "'--rag-mode knowledge_base' needs --knowledge DB");
    if (mode && strcmp(mode, "dummy") == 0 && o->knowledge)
        return error_set(err, ERR_USAGE,
                         "'--rag-mode dummy' means no references: leave out --knowledge");
    if (mode && strcmp(mode, "dummy") != 0 && strcmp(mode, "knowledge_base") != 0)
        return error_set(err, ERR_USAGE,
                         "no mode '%s' of references; there are dummy and "
                         "knowledge_base",
                         mode);
    if (o->embeddings && !o->knowledge && !o->slots && !o->board)
        return error_set(err, ERR_USAGE,
                         "'--embeddings' goes with --knowledge, --slots or --board");
    return OK;
}

/* Sets *out to the index of the text among n words; -1 if the text is `none`. */
static int word_parse(const char *what, const char *text, const char *none,
                      const char *const *words, int n, int *out, struct error *err) {
    struct buf all = {0};
    for (*out = -1; *out < n; ++*out)
        if (strcmp(*out < 0 ? none : words[*out], text) == 0) return OK;
    for (int i = 0; i < n; i++) buf_printf(&all, "%s%s", i ? ", " : "", words[i]);
    error_set(err, ERR_USAGE, "no %s '%s'; there are %s and %s", what, text, none, all.data);
    buf_release(&all);
    return err->code;
}

static int pipeline_options_init(struct panel *p, struct error *err) {
    static const char *const facts[] = {"none", "rules", "model"};
    const struct panel_options *o = p->o;
    struct pipeline_options *to = &p->pipeline;
    int facts_index, rc = references_check(o, err);
    if (rc == OK && strcmp(o->role_type, "model") == 0)
        to->type = QUESTION_TYPE_BY_MODEL;
    else if (rc == OK)
        rc = word_parse("roles of type", o->role_type, "auto", question_type_names,
                        N_QUESTION_TYPES, &to->type, err);
    if (rc == OK)
        rc = word_parse("language", o->language, "auto", language_names, N_LANGUAGES, &to->language,
                        err);
    if (rc == OK) rc = word_parse("way to facts", o->facts, "", facts, 3, &facts_index, err);
    if (rc == OK) rc = cli_compat_check(o->compat, err);
    if (rc == OK && o->adapters.n > o->agents)
        rc = error_set(err, ERR_USAGE, "there are more adapters than --agents");
    if (rc) return rc;
    to->facts = (enum fact_source)facts_index;
    to->agents = (int)o->agents;
    to->iterations = (int)o->iterations;
    to->summary = o->summary;
    to->compat = o->compat != NULL;
    to->temperature = (float)o->temperature;
    to->max_tokens = (int32_t)o->max_tokens;
    to->seconds = o->seconds;
    for (int s = 0; s < PIPELINE_N_STAGES; s++) {
        to->stage[s].temperature = (float)o->temps[s];
        to->stage[s].max_tokens = (int32_t)o->tokens[s];
    }
    return OK;
}

/* models */

/* The absolute path of a model, or hf:OWNER/REPO for a name on the hub. malloc'ed. */
static char *model_location(const char *name) {
    char *found = cli_find_model(name), *place = path_absolute(found);
    free(found);
    return place;
}

static int models_open(struct panel *p, const struct setup_options *so,
                       const struct panel_params *w, struct error *err) {
    const struct panel_options *o = p->o;
    const char *model = w->model ? w->model : o->model_path ? o->model_path : o->model_name;
    char *paths[PIPELINE_N_STAGES];
    const struct setup_needs needs = {
        .engine = {.max_rows = 512, .max_seqs = 32}, .adapters = w->adapters, .work = PANEL_WORK};
    for (int s = 0; s < PIPELINE_N_STAGES; s++)
        paths[s] = model_location(o->models[s] ? o->models[s] : model);
    int rc = base_models_open(&p->bases, p->c, so, (const char *const *)paths, PIPELINE_N_STAGES,
                              p->stage_base, &needs, err);
    for (int s = 0; s < PIPELINE_N_STAGES; s++) free(paths[s]);
    return rc;
}

int panel_open(struct panel *p, const struct cli_options *c, const struct setup_options *so,
               const struct panel_options *o, const struct panel_params *w, struct error *err) {
    *p = (struct panel){.c = c, .o = o};
    int rc = pipeline_options_init(p, err);
    if (rc != OK) return rc;
    if (o->cache_folder) setenv("SHOAL_CACHE", o->cache_folder, 1);
    legacy_flags_note(o);
    p->w = workflow_open(o->slots ? "slots" : o->protocol, err);
    if (!p->w || models_open(p, so, w, err) != OK) return err->code;
    p->ready = p->bases.v[0].m != NULL;
    return OK;
}

struct setup *panel_base(struct panel *p, enum pipeline_stage s) {
    return &p->bases.v[p->stage_base[s]];
}

static int adapters_load(struct panel *p, struct error *err) {
    const struct strings *dirs = &p->o->adapters;
    for (int i = 0; i < dirs->n; i++)
        if (strcmp(dirs->v[i], "base") != 0 &&
            !(p->adapters[i] = setup_adapter(panel_base(p, PIPELINE_INTERNAL), dirs->v[i], err)))
            return err->code;
    return OK;
}

static int engines_open(struct panel *p, struct error *err) {
    for (int i = 0; i < p->bases.n; i++) {
        struct setup *s = &p->bases.v[i];
        if (setup_engine(s, err) != OK) return err->code;
        p->engine_clients[i] =
            (struct engine_client){.engine = s->e, .model = s->m, .store = p->store};
    }
    for (int s = 0; s < PIPELINE_N_STAGES; s++)
        p->pipeline.stage[s].llm_client =
            engine_client_as_llm(&p->engine_clients[p->stage_base[s]]);
    return OK;
}

static int embedder_init(struct panel *p, struct error *err) {
    const struct setup *s = panel_base(p, PIPELINE_INTERNAL);
    p->engine_embedder =
        (struct engine_embedder){.engine = s->e, .model = s->m, .max_len = engine_max_len(s->e)};
    p->pipeline.embedder = &p->embedder;
    return embedder_open(&p->embedder, &p->engine_embedder, err);
}

int panel_start(struct panel *p, const struct panel_params *w, struct error *err) {
    const struct panel_options *o = p->o;
    const char *id = o->conversation ? o->conversation : "ask";
    struct pipeline_options *to = &p->pipeline;
    struct blackboard_options board = {.name = id, .clock = now};
    int rc = adapters_load(p, err);
    if (rc == OK && !(p->store = setup_store(&p->bases.v[0], err))) rc = err->code;
    if (rc == OK) rc = engines_open(p, err);
    if (rc == OK && o->embeddings) rc = embedder_init(p, err);
    /* the board of a conversation that is not stored stays in memory */
    board.store = w->remember && !o->conversation ? NULL : p->store;
    if (rc == OK && !(to->board = blackboard_open(&board, err))) rc = err->code;
    if (rc == OK && (o->conversation || w->remember) &&
        !(to->memory = conversation_open(o->conversation ? p->store : NULL, id, err)))
        rc = err->code;
    if (rc == OK && o->knowledge && !(p->knowledge = knowledge_open(o->knowledge, false, err)))
        rc = err->code;
    to->workflow = p->w;
    to->knowledge = p->knowledge;
    to->adapters = p->adapters;
    to->seed = w->seed;
    return rc;
}

int panel_close(struct panel *p, int rc, struct error *err) {
    knowledge_close(p->knowledge);
    conversation_close(p->pipeline.memory);
    blackboard_close(p->pipeline.board);
    store_close(p->store);
    workflow_free(p->w);
    return base_models_close(&p->bases, rc, err);
}

int conversation_forget_facts(struct conversation *memory, const char *text, struct error *err) {
    int n, rc = conversation_remove_facts(memory, strcmp(text, "all") == 0 ? NULL : text, &n, err);
    if (rc == OK) log_info("facts forgotten: %d", n);
    return rc;
}

int panel_forget(const struct cli_options *c, const struct setup_options *so,
                 const char *conversation, const char *text, struct error *err) {
    const struct setup s = {.c = c, .o = so};
    struct store *store = setup_store(&s, err);
    struct conversation *memory = store ? conversation_open(store, conversation, err) : NULL;
    int rc = memory ? conversation_forget_facts(memory, text, err) : err->code;
    conversation_close(memory);
    store_close(store);
    return rc;
}

void panel_board_print(const struct panel *p) {
    json_t *view = blackboard_debug_view(p->pipeline.board);
    char *text = json_dumps(view, JSON_INDENT(2));
    printf("%s\n", text);
    free(text);
    json_decref(view);
}
