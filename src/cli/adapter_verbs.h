/* adapter_verbs: the subcommands list, prune, profile, extract and resize of `shoal adapter`, and
 * shared output. */
#ifndef SHOAL_CLI_ADAPTER_VERBS_H
#define SHOAL_CLI_ADAPTER_VERBS_H

#include "adapter/adapter.h"
#include "cli/cli.h"

/* Whether the directory has an adapter or versions of one. */
bool dir_is_adapter(const char *dir);
/* shoal adapter prune: deletes versions of adapters, and candidates of finished runs. */
struct prune_request {
    int64_t keep;
    const char *older_than, *min_score; /* as in the options; NULL: no condition */
    bool yes;
};
int cmd_adapter_prune(const struct cli_options *c, const struct strings *args,
                      const struct prune_request *q, struct error *err);
/* shoal adapter list: versions of adapter directories, or of those in a folder. */
int cmd_adapter_list(const struct cli_options *c, const struct strings *args, struct error *err);

/* shoal adapter profile: args: profile ADAPTER FILE …; dry_run: do not write. */
int cmd_adapter_profile(const struct cli_options *c, const struct strings *args, bool dry_run,
                        struct error *err);

struct cut_request {
    struct lora_truncation cut;
    const char *out; /* out and fold: see adapter_write */
    bool fold;
    bool dry_run; /* do everything except the write */
};
/* args: extract BASE FINETUNED; `base` is BASE, already open. */
int cmd_adapter_extract(const struct cli_options *c, struct model *base, const struct strings *args,
                        const struct cut_request *q, struct pool *pool, struct error *err);
/* args: resize ADAPTER. */
int cmd_adapter_resize(const struct cli_options *c, struct model *m, const struct strings *args,
                       const struct cut_request *q, struct pool *pool, struct error *err);

json_t *divergence_json(struct kl_divergence d);
void print_divergence(const char *what, struct kl_divergence d);

#endif
