/*
 * options: the one table of training options, named as in PEFT and TRL.
 *
 * Flags, recipe keys, defaults, ranges and help all come from these rows; nothing else in the
 * program knows a default.
 */
#include "train/train.h"

#define AT(field) offsetof(struct train_options, field)

const struct option_row train_option_rows[] = {
    {"r", OPT_INT, AT(r), "32", 1, 1024, "N", "LoRA rank"},
    {"lora-alpha", OPT_FLOAT, AT(lora_alpha), "0", 0, 1e6, "X",
     "LoRA scale is alpha / r (0: alpha = 2r)"},
    {"lora-dropout", OPT_FLOAT, AT(lora_dropout), "0.05", 0, 0.99, "P",
     "dropout before the adapters' A"},
    {"target", OPT_STRING, AT(target), "all-linear", 0, 0, "LIST",
     "projections to adapt, such as q_proj,v_proj"},
    {"epochs", OPT_FLOAT, AT(epochs), "1", 1e-6, 1e6, "X", "passes over the data"},
    {"max-steps", OPT_INT, AT(max_steps), "0", 0, 1e9, "N", "updates (0: by epochs)"},
    {"lr", OPT_FLOAT, AT(lr), "2e-4", 0, 10, "X", "peak learning rate"},
    {"bsz", OPT_INT, AT(bsz), "1", 1, 65536, "N", "samples of each adapter in a micro-batch"},
    {"grad-accum", OPT_INT, AT(grad_accum), "16", 1, 65536, "N", "micro-batches an update"},
    {"lr-scheduler", OPT_STRING, AT(lr_scheduler), "cosine", 0, 0, "NAME",
     "cosine, linear or constant"},
    {"warmup-ratio", OPT_FLOAT, AT(warmup_ratio), "0.03", 0, 1, "X",
     "share of the updates that warms up"},
    {"min-lr-ratio", OPT_FLOAT, AT(min_lr_ratio), "0", 0, 1, "X",
     "the schedule's end, as a share of lr"},
    {"optim", OPT_STRING, AT(optim), "adamw", 0, 0, "NAME", "adamw, adamw_8bit or sgd"},
    {"momentum", OPT_FLOAT, AT(momentum), "0.9", 0, 0.999999, "X", "of sgd"},
    {"gradient-checkpointing", OPT_BOOL, AT(gradient_checkpointing), NULL, 0, 0, NULL,
     "make activations again instead of keeping them: less memory, more time"},
    {"f32-backward", OPT_BOOL, AT(f32_backward), NULL, 0, 0, NULL,
     "quantised bases: gradients of activations in f32, slower, instead of int8 blocks"},
    {"use-rslora", OPT_BOOL, AT(use_rslora), NULL, 0, 0, NULL, "scale by alpha / sqrt(r)"},
    {"use-dora", OPT_BOOL, AT(use_dora), NULL, 0, 0, NULL,
     "train magnitudes besides (weight-decomposed low-rank adaptation)"},
    {"beta1", OPT_FLOAT, AT(beta1), "0.9", 0, 0.999999, "X", "AdamW's first decay"},
    {"beta2", OPT_FLOAT, AT(beta2), "0.999", 0, 0.9999999, "X", "AdamW's second decay"},
    {"eps", OPT_FLOAT, AT(eps), "1e-8", 1e-30, 1, "X", "AdamW's epsilon"},
    {"weight-decay", OPT_FLOAT, AT(weight_decay), "0", 0, 10, "X", "AdamW's decay of matrices"},
    {"max-grad-norm", OPT_FLOAT, AT(max_grad_norm), "1", 0, 1e9, "X",
     "clip each adapter's gradient (0: never)"},
    {"max-length", OPT_INT, AT(max_length), "0", 0, 1e7, "N",
     "cut samples to N tokens (0: the model's length)"},
    {"seed", OPT_INT, AT(seed), "0", 0, 9e15, "N", "of initialisation, shuffling and dropout"},
    {"save-steps", OPT_INT, AT(save_steps), "200", 0, 1e9, "N",
     "updates between checkpoints (0: only at the end)"},
    {0},
};
