/* dry_run: prints --dry-run output for every command without a special plan format, and the work
 * and time that debate, eval and evolve estimate. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>

const char *cli_duration(double seconds, char out[32]) {
    if (seconds < 60)
        snprintf(out, 32, "%.1f s", seconds);
    else if (seconds < 3600)
        snprintf(out, 32, "%.1f min", seconds / 60);
    else
        snprintf(out, 32, "%.1f h", seconds / 3600);
    return out;
}

static long long count(const json_t *v, const char *key) {
    return json_integer_value(json_object_get(v, key));
}

/* The measurement, and the length of its replies. */
static void measured_text(const json_t *work, struct buf *out) {
    long long prompt = count(work, "measured_prompt_tokens"),
              generated = count(work, "measured_generated_tokens");
    buf_printf(out, "  %-18s %lld prompt tokens in %.3f s", "measured", prompt,
               json_get_number(work, "measured_prompt_seconds"));
    if (generated)
        buf_printf(out, ", %lld generated tokens in %.3f s", generated,
                   json_get_number(work, "measured_generation_seconds"));
    if (json_is_true(json_object_get(work, "replies_ended")))
        buf_printf(out, "; replies had %.0f %% of the tokens that they may have",
                   100 * json_get_number(work, "reply_share"));
    buf_puts(out, "\n");
}

void cli_work_text(const json_t *plan, struct buf *out) {
    const json_t *work = json_object_get(plan, "work");
    double seconds = json_get_number(plan, "seconds"), most = json_get_number(plan, "max_seconds");
    bool ended = json_is_true(json_object_get(work, "replies_ended"));
    char text[2][32];
    if (json_object_get(work, "trainings")) {
        buf_printf(out, "  %-18s %lld, %lld updates, %lld tokens in about %s\n", "trainings",
                   count(work, "trainings"), count(work, "updates"), count(work, "trained_tokens"),
                   cli_duration(json_get_number(work, "training_seconds"), text[0]));
        buf_printf(out, "  %-18s %lld\n", "evaluations", count(work, "evaluations"));
    }
    buf_printf(out, "  %-18s %lld\n", "requests", count(work, "requests"));
    buf_printf(out, "  %-18s %lld, %lld of them in the prefix cache\n", "prompt tokens",
               count(work, "prompt_tokens"), count(work, "cached_tokens"));
    buf_printf(out, "  %-18s at most %lld\n", "generated tokens",
               count(work, "max_generated_tokens"));
    if (ended)
        buf_printf(out, "  %-18s about %s, at most %s\n", "time", cli_duration(seconds, text[0]),
                   cli_duration(most, text[1]));
    else if (count(work, "max_generated_tokens"))
        buf_printf(out, "  %-18s at most %s, less if replies end before their limit\n", "time",
                   cli_duration(most, text[0]));
    else
        buf_printf(out, "  %-18s about %s\n", "time", cli_duration(seconds, text[0]));
    if (count(work, "requests")) measured_text(work, out);
}

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

/* One line for each member: "memory, total". */
static void object_print(const char *key, const json_t *object) {
    const char *member;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)object, member, v) {
        char *name = xasprintf("%s, %s", key, member);
        line_print(name, v);
        free(name);
    }
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
    bool has_work = json_object_get(plan, "work");
    json_object_foreach (plan, key, v) {
        bool is_work = has_work && (strcmp(key, "work") == 0 || strstr(key, "seconds"));
        if (is_work) continue; // printed below
        if (json_is_object(v)) object_print(key, v);
        if (!json_is_array(v) && !json_is_object(v)) line_print(key, v);
        json_array_foreach (v, i, item) line_print(i ? "" : key, item);
    }
    if (has_work) {
        struct buf text = {0};
        cli_work_text(plan, &text);
        fputs(text.data, stdout);
        buf_release(&text);
    }
    json_decref(plan);
}
