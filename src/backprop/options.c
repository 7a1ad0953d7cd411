/*
 * options: the table of training options, named as in PEFT and TRL.
 *
 * Flags, recipe keys, defaults, ranges and help texts come from these rows. Aliases are the names
 * that PEFT, TRL and earlier programs (docs/COMPATIBILITY.md) use.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct train_options, field)
#define ALIAS(name, row)                                                                           \
    { name, OPT_ALIAS, 0, row, 0, 0, NULL, NULL }

const struct option_row train_option_rows[] = {
    {"r", OPT_INT, AT(r), "32", 1, 1024, "N", "LoRA rank"},
    {"lora-alpha", OPT_FLOAT, AT(lora_alpha), "0", 0, 1e6, "X",
     "LoRA scale is alpha / r (0: alpha = 2r)"},
    {"lora-dropout", OPT_FLOAT, AT(lora_dropout), "0.05", 0, 0.99, "P",
     "dropout before the adapters' A"},
    {"target", OPT_LIST, AT(target), "all-linear", 0, 0, "NAME",
     "projections to adapt: q_proj v_proj, or all-linear; also embed_tokens and lm_head",
     JOB_ARG_TEXT},
    {"layers", OPT_LIST, AT(layers), "all", 0, 0, "N",
     "layers to adapt, counted from 0: 4 5, or 12-29, or all", JOB_ARG_TEXT},
    {"modules-to-save", OPT_LIST, AT(modules_to_save), NULL, 0, 0, "NAME",
     "train a copy of the whole table: embed_tokens, lm_head", JOB_ARG_TEXT},
    {"trainable-token-indices", OPT_LIST, AT(trainable_token_indices), NULL, 0, 0, "ID",
     "train the embeddings of these tokens: 5 7-9; ids after lm_head= are rows of the head",
     JOB_ARG_TEXT},
    {"use-rslora", OPT_BOOL, AT(use_rslora), NULL, 0, 0, NULL,
     "LoRA scale is alpha / sqrt(r) instead"},
    {"use-dora", OPT_BOOL, AT(use_dora), NULL, 0, 0, NULL,
     "DoRA: train magnitudes in addition to directions"},
    {"epochs", OPT_FLOAT, AT(epochs), "0", 0, 1e6, "X",
     "passes over the data (0: 1 to 10, so that there are 200 updates)"},
    {"max-steps", OPT_INT, AT(max_steps), "0", 0, 1e9, "N", "number of updates (0: by epochs)"},
    {"lr", OPT_FLOAT, AT(lr), "0", 0, 10, "X",
     "peak learning rate (0: by the model's width, 2.5e-3 of 256, 5e-4 of 2048)"},
    {"bsz", OPT_INT, AT(bsz), "0", 0, 65536, "N",
     "samples of each adapter per micro-batch (0: 4 to 16, a tenth of the samples)"},
    {"grad-accum", OPT_INT, AT(grad_accum), "0", 0, 65536, "N",
     "micro-batches per update, gradient accumulation (0: 1, or as many as make 16 samples)"},
    {"lr-scheduler", OPT_STRING, AT(lr_scheduler), "cosine", 0, 0, "NAME",
     "cosine, linear or constant", JOB_ARG_TEXT},
    {"warmup-ratio", OPT_FLOAT, AT(warmup_ratio), "0.03", 0, 1, "X",
     "warm-up as a fraction of all updates"},
    {"min-lr-ratio", OPT_FLOAT, AT(min_lr_ratio), "0", 0, 1, "X",
     "final learning rate as a fraction of lr"},
    {"optim", OPT_STRING, AT(optim), "adamw", 0, 0, "NAME",
     "adamw, adamw_8bit (moments in 8 bits) or sgd", JOB_ARG_TEXT},
    {"momentum", OPT_FLOAT, AT(momentum), "0.9", 0, 0.999999, "X", "momentum of sgd"},
    {"beta1", OPT_FLOAT, AT(beta1), "0.9", 0, 0.999999, "X", "beta1 of AdamW"},
    {"beta2", OPT_FLOAT, AT(beta2), "0.999", 0, 0.9999999, "X", "beta2 of AdamW"},
    {"eps", OPT_FLOAT, AT(eps), "1e-8", 1e-30, 1, "X", "epsilon of AdamW"},
    {"weight-decay", OPT_FLOAT, AT(weight_decay), "0", 0, 10, "X",
     "decoupled weight decay of matrices (AdamW)"},
    {"max-grad-norm", OPT_FLOAT, AT(max_grad_norm), "1", 0, 1e9, "X",
     "clip each adapter's gradient (0: never)"},
    {"max-length", OPT_INT, AT(max_length), "0", 0, 1e7, "N",
     "cut samples to N tokens (0: the model's length)"},
    {"seed", OPT_INT, AT(seed), "0", 0, 9e15, "N", "seed of initialisation, shuffling and dropout"},
    {"save-steps", OPT_INT, AT(save_steps), "200", 0, 1e9, "N",
     "updates between checkpoints (0: only at the end)"},
    {"gradient-checkpointing", OPT_BOOL, AT(gradient_checkpointing), NULL, 0, 0, NULL,
     "recompute activations in the backward pass, also if there is memory for them"},
    {"activation-memory", OPT_STRING, AT(activation_memory), "auto", 0, 0, "SIZE",
     "memory of a pass, such as 2G; activations that do not fit are computed again in the "
     "backward pass; all: keep all; auto: a third of the weights, at least 256M",
     JOB_ARG_TEXT},
    {"kv-cache-dtype", OPT_STRING, AT(kv_cache_dtype), "auto", 0, 0, "ELEM",
     "number format of keys and values, in training as in the engine: f32, bf16, f16, i8 or auto "
     "(f16; bf16 where attention runs in bf16)",
     JOB_ARG_TEXT},
    {"f32-backward", OPT_BOOL, AT(f32_backward), NULL, 0, 0, NULL,
     "gradients in f32 instead of int8 blocks (quantised base models) or bf16 tiles (AVX512_BF16, "
     "AMX); slower"},
    ALIAS("lora-r", "r"),
    ALIAS("alpha", "lora-alpha"),
    ALIAS("dropout", "lora-dropout"),
    ALIAS("target-modules", "target"),
    ALIAS("layers-to-transform", "layers"),
    ALIAS("num-train-epochs", "epochs"),
    ALIAS("learning-rate", "lr"),
    ALIAS("batch-size", "bsz"),
    ALIAS("per-device-train-batch-size", "bsz"),
    ALIAS("gradient-accumulation-steps", "grad-accum"),
    ALIAS("lr-scheduler-type", "lr-scheduler"),
    ALIAS("adam-beta1", "beta1"),
    ALIAS("adam-beta2", "beta2"),
    ALIAS("adam-epsilon", "eps"),
    ALIAS("max-seq-length", "max-length"),
    {0},
};

/* Returns the index of `name` in a NULL-terminated list, or ERR_USAGE (below 0) with a message that
 * has all known names. */
static int name_parse(const char *what, const char *name, const char *const *known,
                      struct error *err) {
    struct buf list = {0};
    for (int i = 0; known[i]; i++) {
        if (name && strcmp(name, known[i]) == 0) {
            buf_release(&list);
            return i;
        }
        buf_printf(&list, "%s%s", i ? ", " : "", known[i]);
    }
    int rc = error_set(err, ERR_USAGE, "%s '%s' is not known; there are %s", what, name ? name : "",
                       list.data);
    buf_release(&list);
    return rc;
}

int optim_parse(const char *name, enum optim *out, struct error *err) {
    static const char *const names[] = {"adamw", "adamw_8bit", "sgd", NULL};
    int i = name_parse("optimizer", name, names, err);
    if (i >= 0) *out = (enum optim)i;
    return MIN(i, OK);
}

int train_kv_dtype_parse(const struct train_options *o, enum numeric_class cls,
                         const char *checkpoint, enum dtype *out, struct error *err) {
    const char *name = o->kv_cache_dtype ? o->kv_cache_dtype : "f32";
    if (strcmp(name, "auto") == 0 && checkpoint && path_exists(checkpoint))
        return checkpoint_kv_dtype(checkpoint, out, err);
    return kv_cache_dtype_parse(name, cls, out, err);
}

int lr_schedule_parse(const char *name, enum lr_schedule *out, struct error *err) {
    static const char *const names[] = {"cosine", "linear", "constant", NULL};
    int i = name_parse("lr scheduler", name, names, err);
    if (i >= 0) *out = (enum lr_schedule)i;
    return MIN(i, OK);
}

int activation_memory_parse(const char *text, size_t *out, struct error *err) {
    bool all = text && strcmp(text, "all") == 0;
    *out = all ? SIZE_MAX : 0;
    if (all || !text || strcmp(text, "auto") == 0 || size_parse(text, out, err) == OK) return OK;
    return error_wrap(err, "--activation-memory is auto, all or a size");
}

/* Returns the names of a list joined as "q_proj,k_proj", or a copy of `none` if the list is empty;
 * malloc'ed. */
static char *list_join(const struct strings *list, const char *none) {
    struct buf text = {0};
    for (int i = 0; i < list->n; i++) buf_printf(&text, "%s%s", i ? "," : "", list->v[i]);
    return text.data ? text.data : xstrdup(none);
}

/* Sets the changes of embedding and head that are not low-rank. */
static int vocab_config_parse(const struct train_options *o, const struct model_config *shape,
                              struct adapter_config *out, struct error *err) {
    char *tables = list_join(&o->modules_to_save, ""),
         *ids = list_join(&o->trainable_token_indices, "");
    int rc = adapter_modules_to_save_parse(tables, shape, out, err);
    if (!rc) rc = adapter_token_indices_parse(ids, shape, out, err);
    free(tables);
    free(ids);
    return rc;
}

int train_adapter_config(const struct train_options *o, const struct model_config *shape,
                         struct adapter_config *out, struct error *err) {
    char *targets = list_join(&o->target, "all-linear"), *layers = list_join(&o->layers, "all");
    *out = (struct adapter_config){.r = (int32_t)o->r,
                                   .dropout = (float)o->lora_dropout,
                                   .rslora = o->use_rslora,
                                   .dora = o->use_dora};
    out->alpha = (float)(o->lora_alpha > 0 ? o->lora_alpha : 2.0 * (double)o->r);
    int rc = adapter_config_targets_parse(targets, shape, out, err);
    if (!rc) rc = adapter_layers_parse(layers, shape, out, err);
    if (!rc) rc = vocab_config_parse(o, shape, out, err);
    if (!rc) rc = adapter_config_check(shape, out, err);
    if (!rc && out->dora && (out->embed.lora.r > 0 || out->head.lora.r > 0))
        rc = error_set(err, ERR_USAGE,
                       "DoRA is for the projections of the layers: leave --use-dora out, or train "
                       "embed_tokens and lm_head with --modules-to-save");
    free(targets);
    free(layers);
    return rc;
}

/* Whether the list names the embedding or the head. */
static bool list_has_table(const struct strings *list) {
    for (int i = 0; i < list->n; i++)
        if (strstr(list->v[i], "embed") || strstr(list->v[i], "lm_head")) return true;
    return false;
}

int train_options_require_plain(const struct train_options *o, const char *operation,
                                struct error *err) {
    const char *option = o->use_dora                    ? "--use-dora"
                         : o->modules_to_save.n         ? "--modules-to-save"
                         : o->trainable_token_indices.n ? "--trainable-token-indices"
                         : list_has_table(&o->target)   ? "embed_tokens and lm_head in --target"
                                                        : NULL;
    if (!option) return OK;
    return error_set(err, ERR_USAGE, "%s is for plain LoRA: leave %s out", operation, option);
}
