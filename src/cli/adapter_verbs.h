/* adapter_verbs: verbs of shoal adapter in files of their own. */
#ifndef SHOAL_CLI_ADAPTER_VERBS_H
#define SHOAL_CLI_ADAPTER_VERBS_H

#include "cli/cli.h"

/* shoal adapter list: versions of adapter directories, or of those in a folder. */
int cmd_adapter_list(const struct cli_options *c, const struct strings *args, struct error *err);

#endif
