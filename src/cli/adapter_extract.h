/*
 * adapter_extract: shoal adapter extract and resize, and the output that the adapter verbs share.
 */
#ifndef SHOAL_CLI_ADAPTER_EXTRACT_H
#define SHOAL_CLI_ADAPTER_EXTRACT_H

#include "adapter/adapter.h"
#include "cli/cli.h"

/* How much of a module to keep. */
struct lora_truncation {
    int32_t rank; /* maximum rank; 0: set by energy alone */
    double energy; /* the smallest rank that keeps this share of ‖ΔW‖²; 0: the rank alone counts */
    bool dry_run; /* do everything except the write */
};
/* args: extract BASE FINETUNED; `base` is BASE, already open. */
int cmd_adapter_extract(const struct cli_options *c, struct model *base, const struct strings *args,
                        struct lora_truncation cut, const char *out, bool fold, struct pool *pool,
                        struct error *err);
/* args: resize ADAPTER. */
int cmd_adapter_resize(const struct cli_options *c, struct model *m, const struct strings *args,
                       struct lora_truncation cut, const char *out, bool fold, struct pool *pool,
                       struct error *err);

/* Writes a GGUF file if `out` ends in .gguf, else a PEFT directory. */
int adapter_write(const struct adapter *a, const char *out, const char *base, bool fold,
                  struct error *err);
json_t *divergence_json(struct kl_divergence d);
void print_divergence(const char *what, struct kl_divergence d);

#endif
