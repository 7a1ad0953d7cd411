/*
 * test_hub: pulling from a hub: the correct files, complete, verified and in place, for any fault
 * of the connection or the server and after any kill; the token is sent to no other host.
 *
 * The hub is a separate process (hub_server.h). Its hashes come from sha256sum and git, not from
 * the program. Kills and full disks happen in forked children.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "folder.h"
#include "hub/internal.h"
#include "hub_server.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#define NAME "hf:school/fry"
#define COMMIT_A "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define COMMIT_B "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

static struct error err;
static struct hub_state *hub;
static pid_t server;
static char dir[64], cache[96], folder[128], endpoint[64], cert[2048], key[4096];
static const struct hub_options fast_retries = {.backoff = 0.01, .stall = 1};

/* The output of a shell command without its newline. */
static void command_read(char *out, size_t size, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *line = NULL;
    assert_true(vasprintf(&line, fmt, ap) > 0);
    va_end(ap);
    FILE *f = popen(line, "r");
    assert_non_null(f);
    size_t n = fread(out, 1, size - 1, f);
    while (n > 0 && out[n - 1] == '\n') n--;
    out[n] = '\0';
    pclose(f);
    free(line);
}

static void tls_key_create(void) {
    command_read(key, sizeof key,
                 "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256"
                 " 2>/dev/null | tee %s/key",
                 dir);
    command_read(cert, sizeof cert, "openssl req -x509 -key %s/key -subj /CN=127.0.0.1 2>/dev/null",
                 dir);
}

static int dir_remove(const char *path) {
    return path_exists(path) ? folder_remove(path) : 0;
}

static int group_set_up(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-hub-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    tls_key_create();
    hub = hub_start(cert, key, &server);
    if (!hub) return -1;
    snprintf(cache, sizeof cache, "%s/cache", dir);
    snprintf(folder, sizeof folder, "%s/hub/school/fry", cache);
    snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%u/", hub->hub_port);
    setenv("SHOAL_CACHE", cache, 1);
    setenv("HF_HOME", dir, 1); // do not use the token of the user who runs the test
    static const char *const unwanted[] = {"HF_TOKEN",    "HF_TOKEN_PATH", "http_proxy",
                                           "https_proxy", "HTTPS_PROXY",   "all_proxy",
                                           "ALL_PROXY",   "no_proxy",      "NO_PROXY"};
    for (size_t i = 0; i < ARRAY_LEN(unwanted); i++) unsetenv(unwanted[i]);
    return 0;
}

static int group_tear_down(void **state) {
    (void)state;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return dir_remove(dir);
}

static void serve_file(const char *path, const void *data, size_t size, bool large) {
    struct served_file *f = &hub->files[hub->n_files++];
    char temp[96];
    CHECK(hub->n_files <= SERVED_FILES && size <= SERVED_MAX);
    snprintf(temp, sizeof temp, "%s/served", dir);
    assert_int_equal(file_write(temp, data, size, &err), OK);
    *f = (struct served_file){.size = size};
    snprintf(f->path, sizeof f->path, "%s", path);
    memcpy(f->data, data, size);
    command_read(f->blob, sizeof f->blob, "git hash-object --no-filters %s", temp);
    if (large) command_read(f->sha256, sizeof f->sha256, "sha256sum <%s | cut -c 1-64", temp);
}

static void serve_random(const char *path, size_t size, uint32_t seed) {
    struct rng rng = rng_make(seed, RNG_TEST, 0, 0);
    uint8_t *data = xmalloc(size);
    for (size_t i = 0; i < size; i++) data[i] = (uint8_t)rng_u32(&rng);
    serve_file(path, data, size, true);
    free(data);
}

/* A repository with a configuration, weights and files that must not be downloaded. */
static int set_up(void **state) {
    (void)state;
    err = (struct error){0};
    setenv("HF_ENDPOINT", endpoint, 1);
    unsetenv("HF_TOKEN");
    size_t faults = offsetof(struct hub_state, commit), end = offsetof(struct hub_state, cert);
    memset((char *)hub + faults, 0, end - faults);
    memcpy(hub->commit, COMMIT_A, sizeof hub->commit);
    hub->n_files = 0;
    serve_file("config.json", "{\"model_type\": \"llama\"}\n", 24, false);
    serve_random("model.safetensors", 300000, 1);
    serve_file("pytorch_model.bin", "\x80\x02", 2, true);
    serve_file("日本語/語彙 1.txt", "猫と犬\n", 10, false);
    return dir_remove(cache);
}

static void assert_message(const char *text) {
    if (!strstr(err.text, text)) fail_msg("no '%s' in '%s'", text, err.text);
}

static void assert_pulls(void) {
    json_t *record = hub_pull(NAME, &fast_retries, &err);
    if (!record) fail_msg("%s", err.text);
    assert_string_equal(json_string_value(json_object_get(record, "path")), folder);
    json_decref(record);
}

static void assert_fails(const char *name, const struct hub_options *o, const char *text) {
    json_t *record = hub_pull(name, o, &err);
    if (record) fail_msg("pulled, but '%s' was expected", text);
    assert_message(text);
}

/* Asserts that the file in the folder equals the hub's and that no partial file is left. */
static void assert_file_pulled(const char *path) {
    const struct served_file *f = file_find(hub, path);
    char *full = path_join(folder, path), *partial = xasprintf("%s.partial", full),
         *etag = xasprintf("%s.partial.etag", full);
    struct buf b = {0};
    assert_int_equal(file_read(full, SERVED_MAX, &b, &err), OK);
    assert_int_equal(b.len, f->size);
    assert_memory_equal(b.data, f->data, f->size);
    assert_false(path_exists(partial) || path_exists(etag));
    buf_release(&b);
    free(full);
    free(partial);
    free(etag);
}

static void assert_absent(const char *path) {
    char *full = path_join(folder, path);
    if (path_exists(full)) fail_msg("'%s' is there", full);
    free(full);
}

static void assert_pull_complete(void) {
    assert_file_pulled("config.json");
    assert_file_pulled("model.safetensors");
    char *found = hub_cached_path(NAME, &err);
    if (!found) fail_msg("%s", err.text);
    assert_string_equal(found, folder);
    free(found);
}

static off_t file_size(const char *path) {
    struct stat st;
    char *full = path_join(folder, path);
    off_t size = stat(full, &st) == 0 ? st.st_size : -1;
    free(full);
    return size;
}

static void test_names_parse(void **state) {
    (void)state;
    static const char *const table[][4] = {
        /* name, repository (NULL: refused), file, revision */
        {"hf:a/b", "a/b", "", "main"},
        {"hf:Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "", "v1.0"},
        {"hf:a/b@refs/pr/3", "a/b", "", "refs/pr/3"},
        {"hf:a/b/q8/c.gguf", "a/b", "q8/c.gguf", "main"},
        {"hf:a/b/模型.gguf@main", "a/b", "模型.gguf", "main"},
        {"hf:gpt2", NULL, NULL, NULL},
        {"hf:", NULL, NULL, NULL},
        {"hf:/b", NULL, NULL, NULL},
        {"hf:a/", NULL, NULL, NULL},
        {"hf:a/b/", NULL, NULL, NULL},
        {"hf:a/b@", NULL, NULL, NULL},
        {"hf:../b", NULL, NULL, NULL},
        {"hf:a/..", NULL, NULL, NULL},
        {"hf:a/b/../c", NULL, NULL, NULL},
        {"hf:a/b@../../c", NULL, NULL, NULL},
        {"hf:a/b?x=1", NULL, NULL, NULL},
        {"hf:a b/c", NULL, NULL, NULL},
        {"hf:猫/犬", NULL, NULL, NULL},
        {"hf:a/b@x\r\ny", NULL, NULL, NULL},
        {"a/b", NULL, NULL, NULL},
    };
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        struct hub_ref n;
        int rc = hub_ref_parse(table[i][0], &n, &err);
        if ((rc == OK) != (table[i][1] != NULL)) fail_msg("'%s': %s", table[i][0], err.text);
        if (rc != OK) continue;
        assert_string_equal(n.repo, table[i][1]);
        assert_string_equal(n.file, table[i][2]);
        assert_string_equal(n.rev, table[i][3]);
    }
}

static void test_paths_stay_inside(void **state) {
    (void)state;
    static const char *const good[] = {"a", "a/b.c", "..a", "a..", "...", "猫/犬 1"};
    static const char *const bad[] = {"",     "/a",     "a/",    "a//b", ".",    "..",  "../a",
                                      "a/..", "a/../b", "a/./b", "a\\b", "a\nb", "\x7f"};
    for (size_t i = 0; i < ARRAY_LEN(good); i++) assert_true(hub_path_safe(good[i]));
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        if (hub_path_safe(bad[i])) fail_msg("'%s' is taken for safe", bad[i]);
}

/* Files as a list of words; the selected ones are returned in the same form. */
static char *select_files(const char *files, const char *include) {
    struct hub_repo r = {.files = xcalloc(32, sizeof *r.files)};
    struct hub_ref name = {.repo = "a/b", .rev = "main"};
    struct strings globs = {0};
    struct buf out = {0};
    char *words = xstrdup(files), *rest = words, *word;
    while ((word = strsep(&rest, " "))) r.files[r.n++].path = word;
    if (*include) strings_add(&globs, include);
    if (hub_repo_select(&r, &name, &globs, &err) != OK) {
        buf_puts(&out, err.text);
    } else {
        for (int i = 0; i < r.n; i++)
            if (r.files[i].wanted) buf_printf(&out, "%s%s", out.len ? " " : "", r.files[i].path);
    }
    strings_release(&globs);
    hub_repo_release(&r);
    free(words);
    return out.data;
}

static void test_choice_of_files(void **state) {
    (void)state;
    static const struct {
        const char *files, *include, *chosen; /* "!text": refused with that text */
    } table[] = {
        {"config.json README.md model.safetensors pytorch_model.bin tf_model.h5", "",
         "config.json model.safetensors"},
        {"config.json model-1-of-2.safetensors model-2-of-2.safetensors "
         "model.safetensors.index.json",
         "",
         "config.json model-1-of-2.safetensors model-2-of-2.safetensors "
         "model.safetensors.index.json"},
        {"config.json model.safetensors model-1-of-1.safetensors model.safetensors.index.json", "",
         "config.json model.safetensors"},
        {"model.safetensors model.fp16.safetensors consolidated.safetensors onnx/config.json", "",
         "model.safetensors"},
        {"tokenizer.model vocab.json merges.txt chat_template.jinja model.safetensors", "",
         "tokenizer.model vocab.json merges.txt chat_template.jinja model.safetensors"},
        {"adapter_config.json adapter_model.safetensors adapter_model.bin optimizer.pt", "",
         "adapter_config.json adapter_model.safetensors"},
        {"README.md only.gguf", "", "only.gguf"},
        {"config.json a-q4.gguf a-q8.gguf", "", "!name one: hf:a/b/FILE"},
        {"config.json a-q4.gguf a-q8.gguf", "*q8*", "a-q8.gguf"},
        {"config.json pytorch_model.bin", "", "!only as pickles"},
        {"config.json pytorch_model.bin", "*.bin", "!is a pickle"},
        {"config.json MODEL.PT", "*.PT", "!is a pickle"},
        {"README.md data.csv", "", "!no model and no adapter"},
        {"config.json model.safetensors", "*.gguf", "!has no file '*.gguf'"},
        {"a/b/c.gguf d.gguf", "a/*", "a/b/c.gguf"},
        {"x x.partial x.partial.etag .hub.json .hub.lock", "*", "x"},
    };
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        char *chosen = select_files(table[i].files, table[i].include);
        bool refused = table[i].chosen[0] == '!';
        if (refused ? !strstr(chosen, table[i].chosen + 1) : strcmp(chosen, table[i].chosen) != 0)
            fail_msg("of '%s': '%s'", table[i].files, chosen);
        free(chosen);
    }
}

static void test_git_hash_is_gits(void **state) {
    (void)state;
    static const int sizes[] = {0,  1,  44, 45, 46,  47,  54,   55,
                                56, 63, 64, 65, 119, 120, 1000, 70001};
    char text[100000], path[96];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(i * 7);
    snprintf(path, sizeof path, "%s/blob", dir);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct hub_file f = {.path = "x", .size = sizes[i]};
        struct hub_digest d;
        assert_int_equal(file_write(path, text, (size_t)sizes[i], &err), OK);
        command_read(f.hash, sizeof f.hash, "git hash-object --no-filters %s", path);
        hub_digest_init(&d, &f);
        for (int at = 0; at < sizes[i]; at += 13) // pieces that match no block boundary
            hub_digest_add(&d, text + at, (size_t)MIN(13, sizes[i] - at));
        if (!hub_digest_matches(&d, &f)) fail_msg("%d bytes", sizes[i]);
    }
}

static void test_pulls_and_records(void **state) {
    (void)state;
    json_t *record = hub_pull(NAME, &fast_retries, &err), *again;
    if (!record) fail_msg("%s", err.text);
    assert_pull_complete();
    assert_absent("pytorch_model.bin");
    assert_string_equal(json_string_value(json_object_get(record, "commit")), COMMIT_A);
    assert_int_equal(json_integer_value(json_object_get(record, "loaded")), 300024);
    assert_int_equal(json_array_size(json_object_get(record, "files")), 2);
    int before = hub->n_cdn;
    again = hub_pull(NAME, &fast_retries, &err);
    assert_int_equal(json_integer_value(json_object_get(again, "loaded")), 0);
    assert_int_equal(hub->n_cdn, before);
    json_t *list = hub_list(&err);
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "path")),
                        folder);
    json_decref(list);
    json_decref(record);
    json_decref(again);
}

/* Serves the directory's files as a repository. */
static void serve_dir(const char *path) {
    static const char *const names[] = {"config.json",         "model.safetensors",
                                        "tokenizer.json",      "tokenizer_config.json",
                                        "adapter_config.json", "adapter_model.safetensors"};
    hub->n_files = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct buf b = {0};
        char *full = path_join(path, names[i]);
        if (path_exists(full)) {
            assert_int_equal(file_read(full, SERVED_MAX, &b, &err), OK);
            serve_file(names[i], b.data, b.len, strstr(names[i], ".safetensors") != NULL);
        }
        buf_release(&b);
        free(full);
    }
}

/* Only queries: no folder is made, and the plan lists only the missing files. */
static void test_plan_of_a_pull(void **state) {
    (void)state;
    json_t *plan = hub_plan(NAME, &fast_retries, &err);
    if (!plan) fail_msg("%s", err.text);
    assert_int_equal(json_array_size(json_object_get(plan, "files")), 2);
    assert_int_equal(json_get_number(plan, "bytes"), 300024);
    assert_string_equal(json_get_string(plan, "folder"), folder);
    assert_false(path_exists(cache));
    json_decref(plan);
    assert_pulls();
    plan = hub_plan(NAME, &fast_retries, &err);
    assert_int_equal(json_get_number(plan, "bytes"), 0);
    assert_int_equal(json_get_number(plan, "here already"), 2);
    json_decref(plan);
}

/* A model's directory that is pulled through the hub is the same model. */
static void test_pulled_model_opens(void **state) {
    (void)state;
    char model_dir[96], hash[HASH_LEN];
    snprintf(model_dir, sizeof model_dir, "%s/model", dir);
    struct model *m = fixture_model("tiny-llama", true, TENSOR_F32, NUMERIC_EXACT);
    assert_int_equal(model_write_hf(m, model_dir, TENSOR_BF16, &err), OK);
    model_close(m);
    if (!(m = model_open(model_dir, NUMERIC_EXACT, &err))) fail_msg("%s", err.text);
    memcpy(hash, model_hash(m, &err), HASH_LEN);
    model_close(m);
    serve_dir(model_dir);
    assert_null(model_open(NAME, NUMERIC_EXACT, &err));
    assert_message("run 'shoal pull " NAME "'");
    assert_pulls();
    if (!(m = model_open(NAME, NUMERIC_EXACT, &err))) fail_msg("%s", err.text);
    assert_string_equal(model_hash(m, &err), hash);
    assert_string_equal(m->name, "fry");
    model_close(m);
}

static void test_pulled_adapter_loads(void **state) {
    (void)state;
    char model_dir[96];
    struct model_config c;
    snprintf(model_dir, sizeof model_dir, "%s/adapter", dir);
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct adapter *a = fixture_adapter(&c, 4, "all-linear", 0.1f, 3), *b;
    assert_int_equal(adapter_save(a, model_dir, "school/base", &err), OK);
    serve_dir(model_dir);
    assert_null(adapter_load(NAME, &c, &err));
    assert_message("run 'shoal pull " NAME "'");
    assert_pulls();
    if (!(b = adapter_load(NAME, &c, &err))) fail_msg("%s", err.text);
    assert_string_equal(a->hash, b->hash);
    adapter_release(a);
    adapter_release(b);
}

static void test_files_by_name(void **state) {
    (void)state;
    struct hub_options o = fast_retries;
    serve_random("a-q4.gguf", 5000, 2);
    serve_random("a-q8.gguf", 6000, 3);
    strings_add(&o.include, "日本語/*");
    json_t *record = hub_pull(NAME "/a-q8.gguf@main", &o, &err);
    if (!record) fail_msg("%s", err.text);
    json_decref(record);
    assert_file_pulled("a-q8.gguf");
    assert_file_pulled("日本語/語彙 1.txt");
    assert_absent("config.json");
    char *found = hub_cached_path(NAME, &err), *wanted = path_join(folder, "a-q8.gguf");
    assert_string_equal(found, wanted);
    free(found);
    assert_null(hub_cached_path(NAME "/a-q4.gguf", &err));
    assert_message("run 'shoal pull " NAME "/a-q4.gguf'");
    record = hub_pull(NAME "/a-q4.gguf", &fast_retries, &err);
    assert_int_equal(json_array_size(json_object_get(record, "files")), 3);
    json_decref(record);
    assert_null(hub_cached_path(NAME, &err));
    assert_message("name one");
    found = hub_cached_path(NAME "/a-q8.gguf", &err);
    assert_string_equal(found, wanted);
    free(found);
    free(wanted);
    strings_release(&o.include);
}

static void test_dropped_connections(void **state) {
    (void)state;
    hub->n_drops = 3;
    hub->drop_after = 80000;
    assert_pulls();
    assert_pull_complete();
    assert_int_equal(hub->n_partial, 3);
    assert_int_equal(hub->n_if_range, 3);
    assert_true(hub->cdn_bytes < 300000 + 4 * 4096 * 8); /* hardly any byte was sent twice */
}

static void test_silent_server(void **state) {
    (void)state;
    hub->n_stalls = 1;
    assert_pulls();
    assert_pull_complete();
    assert_int_equal(hub->n_partial, 1);
}

static void test_servers_without_ranges(void **state) {
    (void)state;
    hub->n_drops = 1;
    hub->drop_after = 100000;
    hub->no_ranges = true;
    assert_pulls();
    assert_pull_complete();
    dir_remove(cache);
    hub->n_drops = 1000; // no progress: no reason to retry without end
    assert_fails(NAME, &fast_retries, "gave up after 6 tries");
}

/* Runs a pull in a child and kills it when `after` bytes of the weights are stored. */
static void pull_and_kill(off_t after) {
    pid_t child = fork();
    if (child == 0) {
        hub_pull(NAME, &fast_retries, &err);
        _exit(0);
    }
    int status = 0;
    while (file_size("model.safetensors.partial") < after && waitpid(child, &status, WNOHANG) == 0)
        usleep(200);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
}

/* Waits until the server has noticed the disconnect and counts no more bytes. */
static void server_wait_idle(void) {
    for (int64_t seen = -1; seen != (int64_t)hub->cdn_bytes; usleep(300000))
        seen = (int64_t)hub->cdn_bytes;
}

static void test_killed_at_any_moment(void **state) {
    (void)state;
    hub->slow_us = 300;
    for (int i = 0; i < 12; i++) {
        off_t before = file_size("model.safetensors.partial");
        pull_and_kill(22000 * i);
        assert_absent("model.safetensors");
        assert_null(hub_cached_path(NAME, &err));
        assert_true(file_size("model.safetensors.partial") >= before);
    }
    server_wait_idle();
    hub->cdn_bytes = 0;
    assert_pulls();
    assert_pull_complete();
    /* the server may have counted bytes of a connection that ended meanwhile */
    assert_true(hub->cdn_bytes <= 300000 - 22000 * 11 + 65536);
    assert_true(hub->n_if_range > 0);
}

/* The second host serves other bytes under the same name: the etag differs, and the download starts
 * again. */
static void test_changed_meanwhile(void **state) {
    (void)state;
    hub->slow_us = 300;
    pull_and_kill(100000);
    hub->etag = 2;
    server_wait_idle();
    hub->cdn_bytes = 0;
    assert_pulls();
    assert_pull_complete();
    /* the server may still have counted some bytes of the killed download */
    assert_in_range(hub->cdn_bytes, 300000, 300000 + 65536);
}

static void test_damaged_partial(void **state) {
    (void)state;
    hub->slow_us = 300;
    pull_and_kill(100000);
    char *path = path_join(folder, "model.safetensors.partial");
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, "damage", 6, 5000), 6);
    close(fd);
    free(path);
    assert_pulls();
    assert_pull_complete();
}

static void test_wrong_bytes(void **state) {
    (void)state;
    hub->corrupt = true;
    assert_fails(NAME, &fast_retries, "'model.safetensors' arrived damaged");
    assert_absent("model.safetensors");
    assert_absent("config.json"); /* nothing is moved into place before all files are verified */
    hub->corrupt = false;
    hub->longer = true;
    assert_fails(NAME, &fast_retries, "longer than the 300000 bytes");
    hub->longer = false;
    assert_pulls();
    assert_pull_complete();
}

/* The error message has no end; the client does not wait for it. */
static void test_endless_error_message(void **state) {
    (void)state;
    hub->endless = true;
    hub->fail_status = 404;
    hub->n_hub_fails = 1;
    assert_fails(NAME, &fast_retries, "no model 'school/fry'");
    assert_true(hub->endless_bytes > 0 && hub->endless_bytes < 32u << 20);
    hub->fail_status = 503; /* may pass */
    hub->n_hub_fails = 2;
    assert_pulls();
    assert_pull_complete();
}

/* A link under the name of a partial file is not written through. */
static void test_links_as_partial_files(void **state) {
    (void)state;
    char *partial = path_join(folder, "model.safetensors.partial"), *victim = path_join(cache, "v");
    assert_int_equal(dir_make(folder, &err), OK);
    assert_int_equal(file_write(victim, "precious", 8, &err), OK);
    assert_int_equal(symlink(victim, partial), 0);
    assert_fails(NAME, &fast_retries, "model.safetensors.partial'");
    struct buf kept = {0};
    assert_int_equal(file_read(victim, 100, &kept, &err), OK);
    assert_string_equal(kept.data, "precious");
    buf_release(&kept);
    assert_int_equal(unlink(partial), 0);
    assert_int_equal(mkfifo(partial, 0600), 0);
    assert_fails(NAME, &fast_retries, "is not a regular file");
    assert_int_equal(unlink(partial), 0);
    assert_pulls();
    assert_pull_complete();
    free(partial);
    free(victim);
}

/* Sizes larger than any disk. */
static void test_listed_sizes(void **state) {
    (void)state;
    struct hub_options all = fast_retries;
    struct buf b = {0};
    buf_printf(&b, "{\"sha\":\"%s\",\"siblings\":[", COMMIT_A);
    for (int i = 0; i < 8; i++)
        buf_printf(&b,
                   "%s{\"rfilename\":\"model-%d-of-8.safetensors\",\"size\":%lld,"
                   "\"blobId\":\"%040d\"}",
                   i ? "," : "", i, 1LL << 50, 7);
    buf_puts(&b, "]}");
    CHECK(b.len < sizeof hub->listing);
    memcpy(hub->listing, b.data, b.len + 1);
    strings_add(&all.include, "*");
    assert_fails(NAME, &all, "of free space");
    strings_release(&all.include);
    buf_release(&b);
}

static void test_transient_failures(void **state) {
    (void)state;
    static const int codes[] = {429, 500, 502, 503, 504};
    for (size_t i = 0; i < ARRAY_LEN(codes); i++) {
        hub->fail_status = codes[i];
        hub->n_hub_fails = 2;
        hub->n_cdn_fails = 2;
        dir_remove(cache);
        assert_pulls();
        assert_pull_complete();
    }
    hub->fail_status = 429;
    hub->retry_after = 1;
    hub->n_hub_fails = 1;
    double before = clock_now();
    assert_pulls();
    assert_true(clock_now() - before >= 0.99);
    hub->retry_after = 7000;
    hub->n_hub_fails = 1;
    assert_fails(NAME, &fast_retries, "asks to wait 7000 s");
    hub->retry_after = 0;
    hub->fail_status = 503;
    hub->n_hub_fails = 1000;
    assert_fails(NAME, &fast_retries, "gave up after 6 tries");
    assert_int_equal(hub->n_hub_fails, 1000 - 6);
}

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        int status;
        const char *code, *token, *text;
    } table[] = {
        {401, "RepoNotFound", NULL, "does not exist or is private"},
        {401, "", "t", "does not accept the token"},
        {401, "GatedRepo", NULL, "is gated: accept its terms"},
        {403, "GatedRepo", "t", "is gated: accept its terms"},
        {403, "", "t", "this token (403)"},
        {404, "RevisionNotFound", NULL, "'school/fry' has no revision 'v9'"},
        {404, "RepoNotFound", NULL, "no model 'school/fry'"},
        {400, "", NULL, "answered 400"},
    };
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        hub->n_hub_fails = 1;
        hub->fail_status = table[i].status;
        snprintf(hub->fail_code, sizeof hub->fail_code, "%s", table[i].code);
        table[i].token ? setenv("HF_TOKEN", table[i].token, 1) : unsetenv("HF_TOKEN");
        assert_fails(NAME "@v9", &fast_retries, table[i].text);
        assert_int_equal(hub->n_hub_fails, 0);
    }
    assert_false(path_exists(cache));
}

static void test_token_is_sent_to_no_other_host(void **state) {
    (void)state;
    char path[96];
    snprintf(hub->token, sizeof hub->token, "hf_secretsecret");
    assert_fails(NAME, &fast_retries, "set HF_TOKEN");
    setenv("HF_TOKEN", "hf_other", 1);
    assert_fails(NAME, &fast_retries, "does not accept the token");
    assert_null(strstr(err.text, "hf_other"));
    setenv("HF_TOKEN", "hf_x\r\nX-Evil: 1", 1);
    assert_fails(NAME, &fast_retries, "the token in HF_TOKEN is not valid");
    assert_null(strstr(err.text, "hf_x"));
    unsetenv("HF_TOKEN");
    snprintf(path, sizeof path, "%s/token", dir); // HF_HOME/token
    assert_int_equal(file_write(path, "hf_secretsecret\n", 16, &err), OK);
    assert_pulls();
    unlink(path);
    assert_pull_complete();
    assert_true(hub->n_cdn > 0 && hub->n_tokens_hub > 0);
    assert_int_equal(hub->n_tokens_cdn, 0);
}

static void test_hostile_listings(void **state) {
    (void)state;
#define FILES(f) "{\"sha\":\"" COMMIT_A "\",\"siblings\":[" f "]}"
#define BLOB "\"blobId\":\"" COMMIT_A "\""
    static const char *const table[][2] = {
        {"", "'config.json' arrived damaged"}, /* for comparison: only the corrupt flag is set */
        {"no JSON", "the hub's listing"},
        {"[]", "not a listing of a repository"},
        {"{\"sha\":\"../../x\",\"siblings\":[]}", "not a listing of a repository"},
        {"{\"sha\":\"" COMMIT_A "\",\"siblings\":7}", "not a listing of a repository"},
        {FILES(""), "no model and no adapter"},
        {FILES("7"), "a file without a name"},
        {FILES("{\"rfilename\":\"../../.bashrc\",\"size\":1," BLOB "}"), "'../../.bashrc'"},
        {FILES("{\"rfilename\":\"/etc/passwd\",\"size\":1," BLOB "}"), "'/etc/passwd'"},
        {FILES("{\"rfilename\":\"config.json\",\"size\":1}"), "no usable size and hash"},
        {FILES("{\"rfilename\":\"config.json\",\"size\":-1," BLOB "}"), "no usable size and hash"},
        {FILES("{\"rfilename\":\"config.json\",\"size\":\"1\"," BLOB "}"), "no usable size"},
        {FILES("{\"rfilename\":\"config.json\"," BLOB "}"), "no usable size"},
        {FILES("{\"rfilename\":\"config.json\",\"size\":9007199254740993," BLOB "}"), "no usable"},
        {FILES("{\"rfilename\":\"config.json\",\"size\":1,\"blobId\":\"zz\"}"), "no usable"},
        {FILES("{\"rfilename\":\"model.safetensors\",\"size\":1000000000000000," BLOB "}"),
         "of free space"},
    };
    hub->files[0].data[0] ^= 1;
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        snprintf(hub->listing, sizeof hub->listing, "%s", table[i][0]);
        assert_fails(NAME, &fast_retries, table[i][1]);
    }
}

static void test_concurrent_pulls(void **state) {
    (void)state;
    pid_t child[3];
    hub->slow_us = 200;
    for (int i = 0; i < 3; i++) {
        child[i] = fork();
        if (child[i] == 0) _exit(hub_pull(NAME, &fast_retries, &err) ? 0 : 1);
    }
    for (int i = 0; i < 3; i++) {
        int status;
        waitpid(child[i], &status, 0);
        assert_int_equal(status, 0);
    }
    assert_pull_complete();
    assert_int_equal(hub->n_cdn, 1); /* the waiting process found the files complete */
}

static void test_new_commit(void **state) {
    (void)state;
    char *mine = path_join(folder, "mine.txt");
    serve_file("tokenizer.json", "{}", 2, false);
    assert_pulls();
    assert_int_equal(file_write(mine, "me", 2, &err), OK);
    memcpy(hub->commit, COMMIT_B, sizeof hub->commit);
    hub->n_files = 1;
    serve_random("model.safetensors", 200000, 9);
    hub->slow_us = 300;
    pull_and_kill(100000);
    assert_int_equal(file_size("model.safetensors"), 300000); /* the old commit is still complete */
    assert_int_equal(file_size("tokenizer.json"), 2);
    assert_pulls();
    assert_pull_complete();
    assert_absent("tokenizer.json");
    assert_true(path_exists(mine));
    free(mine);
}

/* The process is killed between the renames and the last write of the record. */
static void test_killed_while_publishing(void **state) {
    (void)state;
    assert_pulls();
    char *record = path_join(folder, ".hub.json"),
         *weights = path_join(folder, "model.safetensors");
    json_t *v = json_parse_file(record, &err);
    json_object_set_new(v, "complete", json_false());
    assert_int_equal(json_dump_file(v, record, 0), 0);
    assert_int_equal(unlink(weights), 0);
    assert_null(hub_cached_path(NAME, &err));
    assert_message("is not here in whole");
    assert_pulls();
    assert_pull_complete();
    json_decref(v);
    free(record);
    free(weights);
}

static void test_foreign_folders(void **state) {
    (void)state;
    char other[96], file[128];
    struct hub_options o = fast_retries;
    snprintf(other, sizeof other, "%s/other", dir);
    snprintf(file, sizeof file, "%s/config.json", other);
    o.to = other;
    assert_int_equal(dir_make(other, &err), OK);
    assert_int_equal(file_write(file, "precious", 8, &err), OK);
    assert_fails(NAME, &o, "comes from elsewhere");
    unlink(file);
    json_decref(hub_pull(NAME, &o, &err));
    assert_true(path_exists(file));
    snprintf(file, sizeof file, "%s/.hub.json", other);
    assert_int_equal(file_write(file, "{\"repo\":\"a/b\"}", 14, &err), OK);
    assert_fails(NAME, &o, "holds another repository");
}

static void test_full_disk(void **state) {
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {100000, 100000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        bool reported =
            !hub_pull(NAME, &fast_retries, &err) && strstr(err.text, "make room and run it again");
        _exit(reported ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    assert_int_equal(file_size("model.safetensors.partial"), 100000);
    assert_pulls();
    assert_pull_complete();
    assert_int_equal(hub->n_partial, 1);
}

static void test_connection_refused(void **state) {
    (void)state;
    double before = clock_now();
    setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);
    assert_fails(NAME, &(struct hub_options){0}, "is this machine online");
    assert_true(clock_now() - before < 0.9); /* no retries if the server cannot be reached */
    static const char *const bad[] = {"ftp://x", "huggingface.co", "https://me:secret@x",
                                      "https://x?y"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        setenv("HF_ENDPOINT", bad[i], 1);
        assert_fails(NAME, &fast_retries, "HF_ENDPOINT is not the address of a hub");
        assert_null(strstr(err.text, "secret"));
    }
}

/* The server's certificate is not trusted: no request is sent to it. */
static void test_untrusted_certificate(void **state) {
    (void)state;
    char url[64];
    if (!hub->tls_port) fail_msg("no TLS server; is openssl installed?");
    snprintf(url, sizeof url, "https://127.0.0.1:%u", hub->tls_port);
    setenv("HF_ENDPOINT", url, 1);
    setenv("HF_TOKEN", "hf_secret", 1);
    assert_fails(NAME, &fast_retries, "certificate");
    assert_int_equal(hub->n_tokens_hub + hub->n_listings, 0);
}

static void test_through_a_proxy(void **state) {
    (void)state;
    setenv("http_proxy", endpoint, 1);
    setenv("HF_ENDPOINT", "http://hub.invalid", 1);
    assert_fails(NAME, &fast_retries, "no model"); // the proxy's answer: it serves no other host
    unsetenv("http_proxy");
}

#define TEST(f) cmocka_unit_test_setup(f, set_up)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_names_parse),
        TEST(test_paths_stay_inside),
        TEST(test_choice_of_files),
        TEST(test_git_hash_is_gits),
        TEST(test_pulls_and_records),
        TEST(test_plan_of_a_pull),
        TEST(test_pulled_model_opens),
        TEST(test_pulled_adapter_loads),
        TEST(test_files_by_name),
        TEST(test_dropped_connections),
        TEST(test_silent_server),
        TEST(test_servers_without_ranges),
        TEST(test_killed_at_any_moment),
        TEST(test_changed_meanwhile),
        TEST(test_damaged_partial),
        TEST(test_wrong_bytes),
        TEST(test_endless_error_message),
        TEST(test_links_as_partial_files),
        TEST(test_listed_sizes),
        TEST(test_transient_failures),
        TEST(test_refusals),
        TEST(test_token_is_sent_to_no_other_host),
        TEST(test_hostile_listings),
        TEST(test_concurrent_pulls),
        TEST(test_new_commit),
        TEST(test_killed_while_publishing),
        TEST(test_foreign_folders),
        TEST(test_full_disk),
        TEST(test_connection_refused),
        TEST(test_untrusted_certificate),
        TEST(test_through_a_proxy),
    };
    return cmocka_run_group_tests(tests, group_set_up, group_tear_down);
}
