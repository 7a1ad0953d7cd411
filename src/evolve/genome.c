/*
 * genome: the genes that are evolved together with the weights (see evolve.h): their inheritance
 * and their records.
 *
 * Numbers are drawn log-uniformly from their range and mutate by a log-normal factor, as in
 * population based training (Jaderberg et al. 2017, which uses 0.8 and 1.2); a prompt mutates to
 * another one of the list. A mutated number stays in its range, and a number of updates is whole.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const gene_names[N_GENES] = {
    [GENE_PROMPT] = "prompt",       [GENE_TEMPERATURE] = "temperature",   [GENE_LR] = "lr",
    [GENE_MAX_STEPS] = "max_steps", [GENE_LORA_DROPOUT] = "lora_dropout",
};

#define AT(field) offsetof(struct genome_options, field)
const struct option_row genome_option_rows[] = {
    {"prompts", OPT_LIST, AT(prompts), NULL, 0, 0, "TEXT",
     "system prompts of children: texts, role:NAME (a role of 'shoal ask'), or none"},
    {"temperature-min", OPT_FLOAT, AT(min[GENE_TEMPERATURE]), "0", 0, 10, "T",
     "smallest temperature of a child's chains of thought"},
    {"temperature-max", OPT_FLOAT, AT(max[GENE_TEMPERATURE]), "0", 0, 10, "T",
     "largest temperature; 0: all are greedy"},
    {"lr-min", OPT_FLOAT, AT(min[GENE_LR]), "0", 0, 10, "X",
     "smallest learning rate of a child's fine-tuning"},
    {"lr-max", OPT_FLOAT, AT(max[GENE_LR]), "0", 0, 10, "X",
     "largest learning rate; 0: finetune.lr"},
    {"max-steps-min", OPT_FLOAT, AT(min[GENE_MAX_STEPS]), "0", 0, 1e6, "N",
     "smallest number of updates of a child's fine-tuning"},
    {"max-steps-max", OPT_FLOAT, AT(max[GENE_MAX_STEPS]), "0", 0, 1e6, "N",
     "largest number of updates; 0: evolve.finetune_steps"},
    {"lora-dropout-min", OPT_FLOAT, AT(min[GENE_LORA_DROPOUT]), "0", 0, 0.99, "P",
     "smallest LoRA dropout of a child's fine-tuning"},
    {"lora-dropout-max", OPT_FLOAT, AT(max[GENE_LORA_DROPOUT]), "0", 0, 0.99, "P",
     "largest LoRA dropout; 0: finetune.lora_dropout"},
    {"mutation-rate", OPT_FLOAT, AT(mutation_rate), "0.2", 0, 1, "P",
     "probability that an inherited gene mutates"},
    {"sigma", OPT_FLOAT, AT(sigma), "0.3", 0, 10, "X",
     "size of a mutation: a number is multiplied by exp(sigma * N(0, 1))"},
    {"keep-weights", OPT_FLOAT, AT(keep_weights), "0", 0, 1, "P",
     "fraction of children that keep the weights of their first parent"},
    {0},
};
#undef AT

bool genome_evolves(const struct genome_options *o, enum gene g) {
    return g == GENE_PROMPT ? o->prompts.n > 0 : o->min[g] > 0 && o->min[g] < o->max[g];
}

int genome_count(const struct genome_options *o) {
    int n = 0;
    for (int g = 0; g < N_GENES; g++) n += genome_evolves(o, (enum gene)g);
    return n;
}

/* The description of the first role with this name, in any language; NULL: the name is unknown. */
static const char *role_description(const char *name) {
    for (int t = 0; t < N_QUESTION_TYPES; t++)
        for (int l = 0; l < N_LANGUAGES; l++)
            for (int i = 0; i < agent_role_count((enum question_type)t); i++) {
                struct agent_role role = agent_role_get((enum question_type)t, (enum language)l, i);
                if (strcmp(role.name, name) == 0) return role.description;
            }
    return NULL;
}

int genome_resolve(struct genome_options *o, struct error *err) {
    static const char prefix[] = "role:";
    for (int i = 0; i < o->prompts.n; i++) {
        char **text = &o->prompts.v[i];
        const char *resolved = strcmp(*text, "none") == 0 ? "" : NULL;
        if (strncmp(*text, prefix, sizeof prefix - 1) == 0) {
            const char *name = *text + sizeof prefix - 1 + strspn(*text + sizeof prefix - 1, " ");
            if (!(resolved = role_description(name)))
                return error_set(err, ERR_USAGE, "genome.prompts: no role '%s'", name);
        }
        if (!resolved) continue;
        free(*text);
        *text = xstrdup(resolved);
    }
    return OK;
}

size_t genome_prompt_bytes(const struct genome_options *o) {
    size_t longest = 0;
    for (int i = 0; i < o->prompts.n; i++) longest = MAX(longest, strlen(o->prompts.v[i]));
    return longest;
}

/* inheritance */

static double number_in_range(const struct genome_options *o, enum gene g, double x) {
    if (g == GENE_MAX_STEPS) x = floor(x + 0.5);
    return fmin(o->max[g], fmax(o->min[g], x));
}

static void gene_draw(const struct genome_options *o, enum gene g, struct genome *out,
                      struct rng *rng) {
    if (g == GENE_PROMPT) {
        out->prompt = o->prompts.v[rng_below(rng, (uint32_t)o->prompts.n)];
        return;
    }
    double lo = math_log(o->min[g]), hi = math_log(o->max[g]);
    out->value[g] = number_in_range(o, g, math_exp(lo + (hi - lo) * (double)rng_uniform(rng)));
}

/* The index of the prompt in the options; -1: they do not have it. */
static int prompt_index(const struct genome_options *o, const char *prompt) {
    for (int i = 0; i < o->prompts.n; i++)
        if (strcmp(o->prompts.v[i], prompt) == 0) return i;
    return -1;
}

static void gene_mutate(const struct genome_options *o, enum gene g, struct genome *out,
                        struct rng *rng) {
    int n = o->prompts.n;
    if (g == GENE_PROMPT && n > 1) {
        uint32_t step = 1 + rng_below(rng, (uint32_t)n - 1);
        out->prompt =
            o->prompts.v[(prompt_index(o, out->prompt) + (int)step) % n]; // never the same one
    }
    if (g == GENE_PROMPT) return;
    double before = out->value[g], normal = (double)rng_normal(rng),
           x = number_in_range(o, g, before * math_exp(o->sigma * normal));
    if (g == GENE_MAX_STEPS && x == before)
        x = number_in_range(o, g, before + (normal < 0 ? -1 : 1));
    out->value[g] = x;
}

/* Whether a child can inherit the gene: after a fork the options may lack the parent's prompt. */
static bool has_gene(const struct genome_options *o, const struct genome *x, enum gene g) {
    return x && (x->genes >> g & 1) && (g != GENE_PROMPT || prompt_index(o, x->prompt) >= 0);
}

struct genome genome_breed(const struct genome_options *o, const struct genome *a,
                           const struct genome *b, struct rng *rng) {
    struct genome out = {0};
    for (int k = 0; k < N_GENES; k++) {
        enum gene g = (enum gene)k;
        if (!genome_evolves(o, g)) continue;
        bool from_b = rng_uniform(rng) < 0.5f && has_gene(o, b, g);
        const struct genome *parent = from_b || !has_gene(o, a, g) ? b : a;
        out.genes |= 1u << g;
        if (!has_gene(o, parent, g)) {
            gene_draw(o, g, &out, rng);
            continue;
        }
        out.value[g] = g == GENE_PROMPT ? 0 : number_in_range(o, g, parent->value[g]);
        if (g == GENE_PROMPT) out.prompt = o->prompts.v[prompt_index(o, parent->prompt)];
        if ((double)rng_uniform(rng) < o->mutation_rate) gene_mutate(o, g, &out, rng);
    }
    return out;
}

/* use */

static const char *prompt_of(const struct genome *x) {
    return x->genes >> GENE_PROMPT & 1 && *x->prompt ? x->prompt : NULL;
}

double genome_value(const struct genome *x, enum gene g, double fallback) {
    return x->genes >> g & 1 ? x->value[g] : fallback;
}

bool genome_asks_equally(const struct genome *a, const struct genome *b) {
    const char *p = prompt_of(a), *q = prompt_of(b);
    return (p && q ? strcmp(p, q) == 0 : p == q) &&
           genome_value(a, GENE_TEMPERATURE, 0) == genome_value(b, GENE_TEMPERATURE, 0);
}

bool genome_equal(const struct genome *a, const struct genome *b) {
    bool equal = a->genes == b->genes && genome_asks_equally(a, b);
    for (int g = 0; g < N_GENES; g++) equal &= a->value[g] == b->value[g];
    return equal;
}

struct agent candidate_agent(const struct candidate *c) {
    bool mixed = !c->adapter;
    return (struct agent){.name = c->name,
                          .system = prompt_of(&c->genome),
                          .adapter = c->adapter,
                          .mix = mixed ? c->mix : NULL,
                          .n_mix = mixed ? c->n_mix : 0,
                          .temperature = (float)genome_value(&c->genome, GENE_TEMPERATURE, 0)};
}

/* records */

json_t *genome_json(const struct genome *x) {
    json_t *v = x->genes ? json_object() : NULL;
    for (int g = 0; g < N_GENES; g++) {
        if (!(x->genes >> g & 1)) continue;
        json_object_set_new(v, gene_names[g],
                            g == GENE_PROMPT      ? json_string(x->prompt)
                            : g == GENE_MAX_STEPS ? json_integer((json_int_t)x->value[g])
                                                  : json_real(x->value[g]));
    }
    return v;
}

char *genes_text(const json_t *genes) {
    return genes ? json_dumps(genes, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(9)) : NULL;
}

void genes_describe(const json_t *genes, struct buf *b) {
    const char *separator = "";
    for (int g = 0; g < N_GENES; g++) {
        const json_t *x = json_object_get(genes, gene_names[g]);
        if (!x) continue;
        buf_printf(b, "%s%s ", separator, gene_names[g]);
        separator = ", ";
        if (json_is_number(x)) {
            buf_printf(b, "%.4g", json_number_value(x));
        } else if (!json_string_length(x)) {
            buf_puts(b, "none");
        } else {
            buf_puts(b, "'");
            buf_add_one_line(b, json_string_value(x));
            buf_puts(b, "'");
        }
    }
}
