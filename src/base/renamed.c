/*
 * renamed: options and values that had another name in version 0.1 (docs/COMPATIBILITY.md).
 *
 * An old name is accepted wherever its option is: on the command line, in variables, configuration
 * files, recipes and requests of jobs. An old name that a user writes causes a note, once per
 * process. Results that are stored or hashed (options of runs, rules in traces) keep the old name,
 * so that runs keep their ids, and version 0.1 and this one can read each other's files.
 *
 * Several options may have had the same old name; the one in the command's table is used. Each
 * current name occurs in one row, and the old name in it is the stored one of all options of the
 * current name. So an old name that only some commands had ('n' for 'max-tokens') is an alias in
 * their tables.
 *
 * A renamed value also has a kind (`what`), because the same word may be a value of several
 * options. Values are not validated here: a name without a row is returned unchanged.
 */
#include "base/internal.h"

#include <stdatomic.h>
#include <string.h>

static const struct renamed_option {
    const char *old, *current;
} renamed_options[] = {
    {"apart", "distance"},
    {"archive", "map-elites-bins"},
    {"batch", "batch-size"},
    {"bite", "predator-damage"},
    {"blx", "blx-alpha"},
    {"brief", "compact-observations"},
    {"buffer", "buffer-size"},
    {"burst", "finetune-steps"},
    {"carry", "carry-elite-stats"},
    {"clip", "clip-range"},
    {"critic-rate", "critic-lr"},
    {"entropy", "entropy-coef"},
    {"every", "update-interval"},
    {"flops", "max-flops"},
    {"fresh", "resample-items"},
    {"group", "update-group-size"},
    {"harm", "max-regression"},
    {"hearing", "hearing-range"},
    {"held-out", "eval-maps"},
    {"here", "observe-cell"},
    {"hi", "upper-bound"},
    {"inner-updates", "num-iterations"},
    {"internal-temp", "internal-temperature"},
    {"internal-tokens", "internal-max-tokens"},
    {"items", "log-samples"},
    {"k", "num-generations"},
    {"keep", "truncation-ratio"},
    {"kv", "kv-cache-dtype"},
    {"lambda", "gae-lambda"},
    {"lean", "low-memory"},
    {"learn", "finetune-data"},
    {"lo", "lower-bound"},
    {"lora", "lora-dtype"},
    {"max-new-tokens", "max-tokens"},
    {"meal", "food-energy"},
    {"measure", "metric"},
    {"merge", "merge-operator"},
    {"mind", "adapter-name"},
    {"minds", "num-adapters"},
    {"move", "target-step-divergence"},
    {"mutate", "mutation-rate"},
    {"output-temp", "output-temperature"},
    {"output-tokens", "output-max-tokens"},
    {"parents", "parent-fraction"},
    {"replay-share", "replay-fraction"},
    {"restart", "patience"},
    {"reuse", "cache"},
    {"rewards-fresh", "rewards-new-cell"},
    {"rewards-wrong", "rewards-no-effect"},
    {"share", "fitness-sharing-radius"},
    {"share", "shared-experience-fraction"},
    {"sight", "predator-vision"},
    {"slope", "selection-pressure"},
    {"spread", "init-noise"},
    {"start", "init-adapter"},
    {"stretch", "perturbation-ticks"},
    {"summary-temp", "summary-temperature"},
    {"summary-tokens", "summary-max-tokens"},
    {"tournament", "tournament-size"},
    {"warmup", "warmup-steps"},
    {"words", "vocabulary"},
    {"working", "chain-of-thought"},
    {"working", "chain-of-thought-fraction"},
    {"worlds", "num-envs"},
};

/* Whether a note is due: once per name, and never with --quiet. */
static bool note_is_due(atomic_bool *noted) {
    return !log_quiet && !atomic_exchange(noted, true);
}

static atomic_bool option_noted[ARRAY_LEN(renamed_options)];

const struct option_row *option_find_renamed(const struct option_row *rows, const char *name,
                                             size_t len, bool print_note) {
    for (size_t i = 0; i < ARRAY_LEN(renamed_options); i++) {
        const struct renamed_option *r = &renamed_options[i];
        if (!option_name_equal(name, r->old, len)) continue;
        for (const struct option_row *row = rows; row->name; row++) {
            if (row->type == OPT_ALIAS || strcmp(row->name, r->current) != 0) continue;
            if (print_note && note_is_due(&option_noted[i]))
                log_info("the option '%s' is named '%s' now; the old name works too", r->old,
                         r->current);
            return row;
        }
    }
    return NULL;
}

const char *option_stored_name(const struct option_row *row) {
    for (size_t i = 0; i < ARRAY_LEN(renamed_options); i++)
        if (strcmp(row->name, renamed_options[i].current) == 0) return renamed_options[i].old;
    return row->name;
}

/*
 * Flags whose word is that of another option too: llama.cpp's `--lora FILE` is --adapter, and
 * `--lora i8` is the old name of --lora-dtype. In files and variables the word is the old name.
 */
static const struct flag_word {
    const char *name, *option;
    const char *const old_values[5]; /* values of the old option; NULL ends them */
} flag_words[] = {{"lora", "adapter", {"f32", "bf16", "f16", "i8", NULL}}};

const char *option_of_flag(const char *name, size_t len, const char *value) {
    for (size_t i = 0; value && i < ARRAY_LEN(flag_words); i++) {
        const struct flag_word *w = &flag_words[i];
        const char *const *old = w->old_values;
        if (!option_name_equal(name, w->name, len)) continue;
        while (*old && strcmp(*old, value) != 0) old++;
        if (!*old) return w->option;
    }
    return NULL;
}

/* values */

static const struct renamed_value {
    const char *what; /* kind of the value */
    const char *old, *current;
    bool stored; /* files and hashes keep the old name */
} renamed_values[] = {
    {"compat", "seed", "legacy", false},
    {"rules", "seed", "legacy", true},
    {"operator", "seed", "factor_blend", true},
    {"reply", "seed", "legacy", false},
    {"section", "learn", "finetune", false},
    {"protocol", "seed", "legacy", false},
    {"protocol", "v4", "revise", false},
    {"protocol", "v4c", "revise-on-error", false},
    {"protocol", "v4ct", "revise-on-error-tail", false},
    {"protocol", "v4t", "revise-tail", false},
};

static atomic_bool value_noted[ARRAY_LEN(renamed_values)];

static const struct renamed_value *value_find(const char *what, const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(renamed_values); i++)
        if (strcmp(renamed_values[i].what, what) == 0 && strcmp(renamed_values[i].old, name) == 0)
            return &renamed_values[i];
    return NULL;
}

const char *current_value(const char *what, const char *name) {
    const struct renamed_value *r = value_find(what, name);
    return r ? r->current : name;
}

const char *renamed_value(const char *what, const char *name) {
    const struct renamed_value *r = value_find(what, name);
    if (r && note_is_due(&value_noted[r - renamed_values]))
        log_info("'%s' is named '%s' since 0.2; the old name still works", r->old, r->current);
    return r ? r->current : name;
}

const char *stored_value(const char *what, const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(renamed_values); i++) {
        const struct renamed_value *r = &renamed_values[i];
        if (r->stored && strcmp(r->what, what) == 0 && strcmp(r->current, name) == 0) return r->old;
    }
    return name;
}
