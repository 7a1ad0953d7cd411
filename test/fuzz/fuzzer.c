/*
 * fuzzer: the targets under libFuzzer. FUZZ_TARGET names the one to run; "list" prints them all;
 * the rest of the command line is libFuzzer's.
 */
#define _GNU_SOURCE
#include "targets.c"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct fuzz_target *target;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *name = getenv("FUZZ_TARGET");
    (void)argc;
    (void)argv;
    log_quiet = true;
    if (name && strcmp(name, "list") == 0) {
        for (size_t i = 0; i < ARRAY_LEN(fuzz_targets); i++) puts(fuzz_targets[i].name);
        exit(0);
    }
    target = name ? fuzz_target_find(name) : NULL;
    if (target) return 0;
    fprintf(stderr, "FUZZ_TARGET is '%s', no target; FUZZ_TARGET=list names them\n",
            name ? name : "");
    exit(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    target->run(data, size);
    return 0;
}
