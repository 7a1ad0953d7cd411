/* dry_run: prints --dry-run output for every command without a special plan format. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <string.h>

static void line_print(const char *key, const json_t *v) {
    const char *text = json_string_value(v);
    printf("  %-18s ", key);
    if (text)
        printf("%s\n", text);
    else if (json_is_boolean(v))
        printf("%s\n", json_is_true(v) ? "yes" : "no");
    else if (json_is_integer(v))
        printf("%lld\n", (long long)json_integer_value(v));
    else
        printf("%.6g\n", json_number_value(v));
}

void cli_print_dry_run(const struct cli_options *c, json_t *plan) {
    const char *key;
    json_t *v, *item;
    size_t i;
    if (c->json) {
        cli_print_json(json_pack("{s:o}", "dry_run", plan));
        return;
    }
    printf("dry run, nothing is written:\n");
    json_object_foreach (plan, key, v) {
        if (!json_is_array(v)) line_print(key, v);
        json_array_foreach (v, i, item) line_print(i ? "" : key, item);
    }
    json_decref(plan);
}
