/* cmd_doctor: `shoal doctor`: prints the features of this machine, which of them the program uses,
 * and what is missing. */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "cli/cli.h"
#include "sandbox/sandbox.h"

#include <gmp.h>
#include <pcre2.h>
#include <sodium.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <yaml.h>

static json_t *libraries(void) {
    char pcre[64] = "";
    pcre2_config(PCRE2_CONFIG_VERSION, pcre);
    pcre[strcspn(pcre, " ")] = 0;
    return json_pack("{s:s,s:s,s:s,s:s,s:s,s:s}", "jansson", jansson_version_str(), "libyaml",
                     yaml_get_version_string(), "pcre2", pcre, "sqlite", sqlite3_libversion(),
                     "libsodium", sodium_version_string(), "gmp", gmp_version);
}

/* {bubblewrap, landlock_abi, why}. bubblewrap isolates commands: its version, or null if commands
 * cannot be isolated, with the reason in "why". landlock isolates jobs: its ABI; 0: the kernel has
 * no landlock. */
static json_t *sandbox_state(void) {
    struct error err;
    char *version = sandbox_version(&err);
    json_t *v =
        json_pack("{s:s?,s:i}", "bubblewrap", version, "landlock_abi", sandbox_landlock_abi());
    if (!version) json_object_set_new(v, "why", json_string(err.text));
    free(version);
    return v;
}

static void sandbox_print(const json_t *v) {
    const char *version = json_string_value(json_object_get(v, "bubblewrap"));
    int abi = (int)json_integer_value(json_object_get(v, "landlock_abi"));
    printf("sandbox    %s; ", version ? version : "commands cannot be run");
    printf(abi ? "landlock ABI %d\n" : "no landlock\n", abi);
}

/* Problems that affect a user, as sentences. */
static json_t *problems(const json_t *sandbox) {
    json_t *list = json_array();
    uint32_t jit = 0;
    pcre2_config(PCRE2_CONFIG_JIT, &jit);
    if (!jit)
        json_array_append_new(list,
                              json_string("pcre2 has no JIT: tokenizing is several times slower"));
    if (!sqlite3_compileoption_used("ENABLE_FTS5"))
        json_array_append_new(list,
                              json_string("sqlite has no FTS5: full-text search will not work"));
    char *starter = cli_find_file("models/fry/config.json");
    if (!path_exists(starter))
        json_array_append_new(list, json_string("the starter model 'models/fry' does not exist: "
                                                "run 'shoal pretrain models/fry/recipe.yaml'"));
    free(starter);
    if (json_is_null(json_object_get(sandbox, "bubblewrap")))
        json_array_append_new(list, json_sprintf("reward commands will not run: %s",
                                                 json_get_string(sandbox, "why")));
    if (access(".", W_OK) != 0)
        json_array_append_new(
            list, json_string("the current folder is not writable: use --runs DIR to save runs"));
    return list;
}

static json_t *levels(void) {
    json_t *list = json_array();
    for (int l = 0; l < CPU_LEVELS; l++)
        if (cpu_has_level((enum cpu_level)l))
            json_array_append_new(list, json_string(cpu_level_name((enum cpu_level)l)));
    return list;
}

static void print(const json_t *v) {
    const char *name;
    size_t i;
    json_t *item;
    printf("shoal %s\nlevel      %s (has:", SHOAL_VERSION,
           json_string_value(json_object_get(v, "level")));
    json_array_foreach (json_object_get(v, "levels"), i, item)
        printf(" %s", json_string_value(item));
    printf(")\nclass      %s\nthreads    %d\nmemory     %.1f GB, %.1f GB free\nhuge pages "
           "%s\nlibraries ",
           json_string_value(json_object_get(v, "class")),
           (int)json_integer_value(json_object_get(v, "threads")),
           1e-9 * (double)json_integer_value(json_object_get(v, "memory_bytes")),
           1e-9 * (double)json_integer_value(json_object_get(v, "free_bytes")),
           json_get_string(v, "huge_pages"));
    json_object_foreach (json_object_get(v, "libraries"), name, item)
        printf(" %s %s", name, json_string_value(item));
    printf("\n");
    sandbox_print(json_object_get(v, "sandbox"));
    json_array_foreach (json_object_get(v, "missing"), i, item)
        printf("missing    %s\n", json_string_value(item));
    if (json_array_size(json_object_get(v, "missing")) == 0) printf("missing    nothing\n");
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    (void)options, (void)args, (void)err;
    json_t *sandbox = sandbox_state();
    struct memory_info m = memory_info("/");
    json_t *v = json_pack(
        "{s:s,s:s,s:o,s:s,s:i,s:I,s:I,s:s,s:o,s:o,s:o}", "version", SHOAL_VERSION, "level",
        kernels_get()->name, "levels", levels(), "class", numeric_class_name(cli_numeric_class(c)),
        "threads", c->threads ? (int)c->threads : cpu_count(), "memory_bytes",
        (json_int_t)MAX(m.total, 0), "free_bytes", (json_int_t)MAX(m.available, 0), "huge_pages",
        m.huge_pages, "libraries", libraries(), "missing", problems(sandbox), "sandbox", sandbox);
    if (c->json) return cli_print_json(v), OK;
    print(v);
    json_decref(v);
    return OK;
}

const struct cli_command cmd_doctor = {
    .name = "doctor",
    .args = "",
    .summary = "print processor level, memory, threads, libraries, and missing parts",
    .about =
        "Prints what the program found on this machine, what it uses, and what is missing. The\n"
        "variable SHOAL_CPU=scalar|avx2|avxvnni|avx512|avx512bf16|amx limits the processor level.",
    .max_args = 0,
    .run = run,
};
