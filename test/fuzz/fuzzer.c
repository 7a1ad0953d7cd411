/*
 * fuzzer: runs one fuzz target under libFuzzer. The environment variable FUZZ_TARGET is the name of
 * the target. Two other values do not fuzz: "list" prints the names of all targets; "large" writes
 * inputs of up to a megabyte, each of which repeats one element, to the folder in the environment
 * variable FUZZ_LARGE. All arguments are libFuzzer's.
 */
#define _GNU_SOURCE
#include "targets.c"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct fuzz_target *target;

/* Each input is `begin`, then `unit` as often as it fits, then `end`. %d in a unit is the number of
 * the repetition. */
static const struct {
    const char *begin, *unit, *end;
} large_inputs[] = {
    {"", "[", ""},
    {"", "{\"a\":", ""},
    {"[", "1,", "1]"},
    {"{", "\"k%d\":%d,", "\"k\":0}"},
    {"[", "{\"a\":[%d,\"b\"]},", "0]"},
    {"\"", "\\u00e9x", "\""},
    {"{\"kind\":\"eval\",\"args\":[\"a\"],\"options\":{", "\"x%d\":%d,", "\"y\":1}}"},
    {"{\"messages\":[", "{\"role\":\"user\",\"content\":\"a%d\"},",
     "{\"role\":\"user\",\"content\":\"\"}]}"},
    {"{\"prompt\":\"", "a b\\n", "\"}"},
    {"{\"type\":\"object\",\"properties\":{", "\"p%d\":{\"type\":\"string\"},", "\"q\":{}}}"},
    {"", "- a%d: [b, {c: d}]\n", ""},
    {"", "  a:\n", ""},
    {"", "key%d = \"value\"\n", ""},
    {"", "{\"question\": \"q%d\", \"answer\": \"a\", \"choices\": [\"x\", \"y\"]}\n", ""},
    {"", "\"a\",\"b\"\"c\",%d\n", ""},
    {"", "{{ a%d }}{%% if a %%}b{%% endif %%}", ""},
    {"", "{%% for i in a %%}", ""},
    {"", "(a|", ""},
    {"", "[a-z]{1,9}", ""},
    {"root ::= ", "r%d | ", "\"a\"\n"},
    {"", "r%d ::= \"a\" r%d?\n", "root ::= r1\n"},
    {"", "# h%d\n\n| a | b |\n|---|---|\n> x `y` **z** [l](u)\n", ""},
    {"", "<div><p>a%d<b>", ""},
    {"<tool_call>", "{\"name\": \"f\", \"arguments\": {\"a\": %d}}</tool_call><tool_call>", "{"},
    {"01{\"name\": \"f\", \"arguments\": [", "\"\\\\\",", "1]}"},
    {"[", "{\"op\":\"add\",\"seq\":%d,\"name\":\"k%d\"},", "{}]"},
    {"", "\xE3\x81\x82\xF0\x9F\x90\x9F", ""},
    {"", "a", ""},
    {"", " ", ""},
    {"", "\n", ""},
};

static void large_write(const char *dir, size_t max_size) {
    struct error err;
    for (size_t i = 0; i < ARRAY_LEN(large_inputs); i++) {
        struct buf b = {0};
        char unit[200], *path = xasprintf("%s/large-%02zu", dir, i);
        buf_puts(&b, large_inputs[i].begin);
        for (int n = 1; b.len + sizeof unit < max_size; n++) {
            // every unit has at most two %d
            snprintf(unit, sizeof unit, large_inputs[i].unit, n, n);
            buf_puts(&b, unit);
        }
        buf_puts(&b, large_inputs[i].end);
        MUST(file_write(path, b.data, b.len, &err) == OK);
        buf_release(&b);
        free(path);
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *name = getenv("FUZZ_TARGET");
    (void)argc;
    (void)argv;
    log_quiet = true;
    if (name && strcmp(name, "list") == 0) {
        for (size_t i = 0; i < ARRAY_LEN(fuzz_targets); i++) puts(fuzz_targets[i].name);
        exit(0);
    }
    if (name && strcmp(name, "large") == 0) {
        MUST(getenv("FUZZ_LARGE") != NULL);
        large_write(getenv("FUZZ_LARGE"), 1 << 20);
        exit(0);
    }
    target = name ? fuzz_target_find(name) : NULL;
    if (target) return 0;
    fprintf(stderr, "FUZZ_TARGET '%s' is not a target; FUZZ_TARGET=list prints the names\n",
            name ? name : "");
    exit(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    target->run(data, size);
    return 0;
}
