/* cmd_salvage: `shoal salvage FILE NEW`: copies the readable rows of a damaged store. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "store/store.h"

static void report_print(const json_t *report) {
    const json_t *v;
    size_t i;
    printf("%-12s%12s%12s%8s  %s\n", "table", "rows", "rejected", "gaps", "first error");
    json_array_foreach (json_object_get(report, "tables"), i, v) {
        const json_t *error = json_object_get(v, "error");
        printf("%-12s%12.0f%12.0f%8zu  %s\n", json_get_string(v, "table"),
               json_get_number(v, "rows"), json_get_number(v, "rejected"),
               json_array_size(json_object_get(v, "gaps")),
               json_is_string(error) ? json_string_value(error) : "");
    }
}

static int salvage(const struct cli_options *c, const void *options, const struct strings *args,
                   struct error *err) {
    json_t *report;
    (void)options;
    int rc = store_salvage(args->v[0], args->v[1], &report, err);
    if (rc != OK) return rc;
    if (json_get_number(report, "damaged") > 0)
        log_warn("%.0f tables of '%s' are damaged; '%s' has the rows that could be read",
                 json_get_number(report, "damaged"), args->v[0], args->v[1]);
    else
        log_info("all rows of '%s' could be read", args->v[0]);
    if (c->json) {
        cli_print_json(report);
    } else {
        report_print(report);
        json_decref(report);
    }
    return OK;
}

static const struct option_row rows[] = {{0}};

const struct cli_command cmd_salvage = {
    .name = "salvage",
    .args = "FILE NEW",
    .summary = "copy the readable rows of a damaged store to a new file",
    .about =
        "A store is a database of Shoal: calls.db, shoal.db, conversations.db, serve.db. If a\n"
        "program that writes to it is killed, the next one checks the file and refuses it if it\n"
        "is damaged. salvage copies every row that can be read to the file NEW and does not\n"
        "change FILE. It prints for each table the rows that are copied, the rows with\n"
        "impossible values, and the number of gaps: ranges of keys that cannot be read. --json\n"
        "also prints the keys at both ends of each gap. Stop the programs that use FILE, and\n"
        "rename both files to continue with the copy.\n"
        "\n"
        "  shoal salvage runs/calls.db runs/calls-new.db\n"
        "  shoal salvage runs/serve/conversations.db new.db --json",
    .rows = rows,
    .min_args = 2,
    .max_args = 2,
    .run = salvage,
};
