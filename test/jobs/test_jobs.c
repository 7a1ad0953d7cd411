/*
 * test_jobs: jobs run, fail, wait, pause, end and are recovered after a kill; clients cannot build
 * arbitrary command lines.
 *
 * The program of the jobs is this test: if its first argument is a kind, it acts as a command whose
 * behaviour the arguments select (the acts below); one test runs the real program. Children run at
 * this process's priority, except in the test of the priority, because they would not run on a busy
 * machine.
 */
/* levels: once */
#define _GNU_SOURCE
#include "jobs/jobs.h"

#include "train/train.h"

#include "folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char dir[64], store[96], folder[96];
static struct jobs *j;
static atomic_int n_changed;

/* option tables of the commands that the acts provide */

#define ROW(name, type, job_get)                                                                   \
    { name, type, 0, NULL, 0, 0, NULL, NULL, job_get }
static const struct option_row rows[] = {
    ROW("exact", OPT_BOOL, JOB_ARG_DEFAULT),
    ROW("json", OPT_BOOL, JOB_ARG_SERVER_ONLY),
    ROW("config", OPT_STRING, JOB_ARG_FORBIDDEN),
    ROW("threads", OPT_INT, JOB_ARG_THREADS),
    ROW("generations", OPT_INT, JOB_ARG_DEFAULT),
    ROW("steps", OPT_INT, JOB_ARG_DEFAULT),
    ROW("maps", OPT_INT, JOB_ARG_DEFAULT),
    ROW("seed", OPT_INT, JOB_ARG_DEFAULT),
    ROW("breed", OPT_BOOL, JOB_ARG_DEFAULT),
    ROW("lr", OPT_FLOAT, JOB_ARG_DEFAULT),
    ROW("name", OPT_STRING, JOB_ARG_TEXT),
    ROW("policy", OPT_LIST, JOB_ARG_TEXT),
    ROW("adapters", OPT_LIST, JOB_ARG_TEXT),
    ROW("none", OPT_LIST, JOB_ARG_TEXT),
    ROW("forgotten", OPT_STRING, JOB_ARG_DEFAULT),
    ROW("secrets", OPT_SECRETS, JOB_ARG_TEXT),
    ROW("runs", OPT_STRING, JOB_ARG_SERVER_ONLY),
    ROW("id", OPT_STRING, JOB_ARG_NAME),
    ROW("model", OPT_STRING, JOB_ARG_INPUT_PATH),
    ROW("data", OPT_LIST, JOB_ARG_NAMED_FILE),
    ROW("conversation", OPT_STRING, JOB_ARG_CLIENT_NAME),
    ROW("tasks", OPT_STRING, JOB_ARG_BUILTIN_OR_PATH_LIST),
    ROW("out", OPT_STRING, JOB_ARG_OUTPUT_PATH),
    ROW("report", OPT_STRING, JOB_ARG_OUTPUT_PATH),
    ROW("reward", OPT_STRING, JOB_ARG_REWARD),
    ROW("policy-pipe", OPT_STRING, JOB_ARG_FORBIDDEN),
    ROW("adapter", OPT_LIST, JOB_ARG_INPUT_PATH),
    ROW("lora-dtype", OPT_STRING, JOB_ARG_TEXT),
    {"output-dir", OPT_ALIAS, 0, "out"},
    {0},
};
static const struct job_args any_args[] = {
    {"export", {JOB_ARG_TEXT, JOB_ARG_OUTPUT_PATH}, false}, {NULL, {JOB_ARG_TEXT}, true}, {0}};
static const struct job_kind kinds[] = {{"world", NULL, NULL, rows, any_args},
                                        {"eval", NULL, NULL, rows, any_args},
                                        {"train", NULL, "runs", rows, any_args},
                                        {"evolve", "resume", "runs", rows, any_args},
                                        {0}};

/* acts of a job's process */

static void print_json(json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(v);
}

static void act_args(int argc, char **argv) {
    json_t *list = json_array();
    for (int i = 0; i < argc; i++) json_array_append_new(list, json_string(argv[i]));
    print_json(list);
}

static void act_work(int argc, char **argv) {
    struct progress p;
    (void)argc, (void)argv;
    progress_start(&p, "work", 25); /* the last report must not depend on the reporting interval */
    for (int i = 1; i <= 25; i++) {
        usleep(20000);
        progress_update(&p, i, NULL);
    }
    progress_finish(&p, NULL);
    print_json(json_pack("{s:i}", "answer", 42));
    printf("not JSON, and no end of line");
}

static void act_fail(int argc, char **argv) {
    (void)argc, (void)argv;
    fprintf(stderr, "warning: a first line\nshoal world: cannot open 'x\x01y'\nusage: shoal\n");
    exit(2);
}

static void act_silent(int argc, char **argv) {
    (void)argc, (void)argv;
    exit(3);
}

static void act_signal(int argc, char **argv) {
    (void)argc, (void)argv;
    raise(SIGUSR1);
}

static void act_stubborn(int argc, char **argv) {
    (void)argc, (void)argv;
    signal(SIGTERM, SIG_IGN);
    pid_t pid = fork(); /* another process that holds the pipes too */
    if (pid != 0) print_json(json_integer(pid));
    for (;;) pause();
}

static void exit_with_9(int signal_number) {
    (void)signal_number;
    _exit(9);
}

static void act_tidy(int argc, char **argv) {
    (void)argc, (void)argv;
    signal(SIGTERM, exit_with_9);
    puts("true");
    fflush(stdout);
    for (;;) pause();
}

/* Exits before its child, which holds the pipes. */
static void act_exit_before_child(int argc, char **argv) {
    (void)argc, (void)argv;
    pid_t pid = fork();
    if (pid != 0) print_json(json_integer(pid));
    while (pid == 0) pause();
}

static void act_spin(int argc, char **argv) {
    (void)argc, (void)argv;
    puts("true");
    fflush(stdout);
    for (volatile int i = 0;; i++) continue;
}

/* Waits until a file of that name exists. */
static void act_wait(int argc, char **argv) {
    CHECK(argc > 0);
    for (puts("true"), fflush(stdout); !path_exists(argv[0]);) usleep(5000);
}

/* Waits to be killed in the first run, and succeeds in the second. */
static void act_once(int argc, char **argv) {
    CHECK(argc > 0);
    if (path_exists(argv[0])) {
        print_json(json_pack("{s:b}", "again", 1));
        return;
    }
    close(open(argv[0], O_WRONLY | O_CREAT, 0600));
    puts("true");
    fflush(stdout);
    for (;;) pause();
}

static void act_lines(int argc, char **argv) {
    CHECK(argc > 0);
    for (int i = 0; i < atoi(argv[0]); i++) printf("{\"i\":%d}\n", i);
}

static void act_wide(int argc, char **argv) {
    char text[100000];
    CHECK(argc > 0);
    memset(text, 'w', sizeof text);
    for (int i = 0; i < atoi(argv[0]); i++) printf("\"%.*s\"\n", (int)sizeof text, text);
}

static void act_flood(int argc, char **argv) {
    (void)argc, (void)argv;
    char block[4096];
    memset(block, 'x', sizeof block);
    for (int i = 0; i < 4096; i++)
        if (write(STDOUT_FILENO, block, sizeof block) < 0) exit(4);
}

static void act_long_line(int argc, char **argv) {
    act_flood(argc, argv);
    printf("\n1\n");
}

/* Writes invalid progress lines between valid ones. */
static void act_garbage(int argc, char **argv) {
    static const char *const bad[] = {
        "\n",
        "{}\n",
        "null\n",
        "\xff\xfe\n",
        "[[[[\n",
        "{\"title\":1,\"done\":1,\"total\":1}\n",
        "{\"title\":\"x\",\"done\":-1,\"total\":1}\n",
        "{\"title\":\"x\",\"done\":1}\n",
        "{\"title\":\"x\",\"done\":1e300,\"total\":1}\n",
        "unfinished",
    };
    struct buf b = {0};
    (void)argc, (void)argv;
    for (int i = 0; i < 1 << 20; i++) buf_puts(&b, "y");
    buf_puts(&b, "\n{\"title\":\"");
    for (int i = 0; i < 100; i++) buf_puts(&b, "鳥鳥");
    buf_puts(&b, "\",\"done\":5,\"total\":0,\"left\":-1}\n");
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) buf_puts(&b, bad[i]);
    for (size_t at = 0; at < b.len;) {
        ssize_t n = write(3, b.data + at, b.len - at);
        if (n < 0) exit(5);
        at += (size_t)n;
    }
    buf_release(&b);
}

/* Reports metrics: known ones, a NaN, and an invalid one; then waits for a file. */
static void act_figures(int argc, char **argv) {
    CHECK(argc > 0);
    for (int i = 1; i <= 1000; i++) {
        process_metrics_report(
            (const struct process_metric[]){{"train_step", i}, {"train_loss", 1.0 / i}}, 2);
        usleep(500); /* all of them fit into a pipe that is not read */
    }
    process_metrics_report(
        (const struct process_metric[]){{"train_loss", NAN}, {"jobs", 1}, {"none", 1}}, 3);
    static const char bad[] = "{\"figures\":{\"train_reward\":\"x\"}}\n{\"figures\":[1]}\n";
    if (write(3, bad, strlen(bad)) < 0) exit(5);
    act_wait(argc, argv);
}

static int fds_open(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = -1; /* without the one that reads the folder */
    for (const struct dirent *f; (f = readdir(d));) n += f->d_name[0] != '.';
    closedir(d);
    return n;
}

static void act_look(int argc, char **argv) {
    (void)argc, (void)argv;
    struct stat in;
    sigset_t blocked;
    fstat(STDIN_FILENO, &in);
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    struct rlimit core, file, data;
    getrlimit(RLIMIT_CORE, &core);
    getrlimit(RLIMIT_FSIZE, &file);
    getrlimit(RLIMIT_DATA, &data);
    mode_t mask = umask(0);
    print_json(json_pack("{s:b,s:i,s:b,s:i,s:b,s:b,s:I,s:I,s:I,s:i}", "idle",
                         sched_getscheduler(0) == SCHED_IDLE, "nice", getpriority(PRIO_PROCESS, 0),
                         "leader", getpgrp() == getpid(), "fds", fds_open(), "null",
                         S_ISCHR(in.st_mode), "term", sigismember(&blocked, SIGTERM), "core",
                         (json_int_t)core.rlim_max, "file", (json_int_t)file.rlim_max, "data",
                         (json_int_t)data.rlim_max, "umask", (int)mask));
}

/* The names of the job's environment variables, except those of a sanitizer. */
static void act_settings(int argc, char **argv) {
    json_t *v = json_object();
    (void)argc, (void)argv;
    for (char **p = environ; *p; p++) {
        char *name = strndup(*p, strcspn(*p, "="));
        if (!strstr(name, "SAN_OPTIONS"))
            json_object_set_new(v, name, json_string(*p + strlen(name) + 1));
        free(name);
    }
    print_json(v);
}

static void act_ticks(int argc, char **argv) {
    (void)argc, (void)argv;
    struct progress p;
    double until = clock_now() + 1.05;
    progress_start(&p, "ticks \"\xff", 1000000000);
    for (int64_t i = 1; clock_now() < until; i++) progress_update(&p, i, "detail");
    progress_finish(&p, NULL);
}

static const char *argument_value(int argc, char **argv, const char *name) {
    for (int i = 0; i < argc; i++)
        if (strncmp(argv[i], name, strlen(name)) == 0) return argv[i] + strlen(name);
    return "";
}

/* Is killed before its run directory is valid, and the second time after that. */
static void act_evolve(int argc, char **argv) {
    const char *runs = argument_value(argc, argv, "--runs=");
    char *run = path_join(runs, argument_value(argc, argv, "--id=")),
         *manifest = path_join(run, "manifest.json");
    bool second = path_exists(runs);
    dir_make(second ? run : runs, &err);
    if (second) file_write(manifest, "{}", 2, &err);
    raise(SIGKILL);
}

static const struct {
    const char *name;
    void (*act)(int argc, char **argv);
} acts[] = {{"args", act_args},         {"work", act_work},
            {"fail", act_fail},         {"silent", act_silent},
            {"signal", act_signal},     {"stubborn", act_stubborn},
            {"spin", act_spin},         {"wait", act_wait},
            {"once", act_once},         {"lines", act_lines},
            {"flood", act_flood},       {"long-line", act_long_line},
            {"garbage", act_garbage},   {"look", act_look},
            {"ticks", act_ticks},       {"leave", act_exit_before_child},
            {"wide", act_wide},         {"tidy", act_tidy},
            {"settings", act_settings}, {"figures", act_figures}};

static int command_main(int argc, char **argv) {
    int at = 1;
    progress_pipe_open();
    log_quiet = log_to_stderr = true;
    while (at < argc && strcmp(argv[at], "--") != 0) at++;
    if (strcmp(argv[1], "evolve") == 0) act_evolve(argc, argv);
    for (size_t i = 0; at + 1 < argc && i < ARRAY_LEN(acts); i++)
        if (strcmp(acts[i].name, argv[at + 1]) == 0) {
            acts[i].act(argc - at - 2, argv + at + 2);
            return 0;
        }
    act_args(argc, argv);
    return 0;
}

/* helpers */

static void on_changed(void *ctx) {
    (void)ctx;
    n_changed++;
}

static struct jobs *jobs_open_with(struct jobs_options o) {
    o.same_priority = true;
    o.changed = on_changed;
    o.rules.kinds = kinds;
    struct jobs *v = jobs_open(store, folder, &o, &err);
    if (!v) fail_msg("%s", err.text);
    return v;
}

static int setup(void **state) {
    (void)state;
    log_quiet = true;
    err = (struct error){0};
    snprintf(dir, sizeof dir, "/tmp/shoal-test-jobs-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(store, sizeof store, "%s/jobs.db", dir);
    snprintf(folder, sizeof folder, "%s/jobs", dir);
    n_changed = 0;
    j = jobs_open_with((struct jobs_options){.cancel_seconds = 0.3});
    return 0;
}

static int teardown(void **state) {
    (void)state;
    jobs_close(j);
    j = NULL;
    return folder_remove(dir);
}

static void reopen(struct jobs_options o) {
    jobs_close(j);
    j = jobs_open_with(o);
}

static char *path_in_dir(const char *name) {
    static char path[2][128];
    static int at;
    at = !at;
    snprintf(path[at], sizeof path[at], "%s/%s", dir, name);
    return path[at];
}

static void touch(const char *name) {
    assert_int_equal(file_write(path_in_dir(name), "", 0, &err), OK);
}

struct id {
    char text[JOB_ID_LEN];
};

static struct id submit(const char *act, const char *arg) {
    struct id id;
    json_t *request = json_pack("{s:s,s:[s,s]}", "kind", "world", "args", act, arg ? arg : "");
    struct job_caller caller = {0};
    if (jobs_submit(j, request, &caller, id.text, &err) != OK) fail_msg("%s", err.text);
    json_decref(request);
    return id;
}

static json_t *job_get(struct id id) {
    json_t *v = jobs_get(j, id.text, &err);
    if (!v) fail_msg("%s", err.text);
    return v;
}

static bool is_in_state(struct id id, const char *state) {
    json_t *v = job_get(id);
    bool is = strcmp(json_get_string(v, "state"), state) == 0;
    json_decref(v);
    return is;
}

/* Waits until the condition holds, for a minute or more: it counts polls, because a machine's clock
 * can advance while no process runs. */
#define UNTIL(holds)                                                                               \
    for (int polls = 0; !(holds) && polls < 30000; polls++) usleep(2000)

static void await_state(struct id id, const char *state) {
    UNTIL(is_in_state(id, state));
    if (is_in_state(id, state)) return;
    json_t *v = job_get(id);
    fail_msg("not %s: %s", state, json_dumps(v, 0));
}

static char *job_text(struct id id, const char *key) {
    static char text[2048];
    json_t *v = job_get(id);
    snprintf(text, sizeof text, "%s", json_get_string(v, key));
    json_decref(v);
    return text;
}

static int job_number(struct id id, const char *key) {
    json_t *v = job_get(id), *n = json_object_get(v, key);
    int i = n ? (int)json_integer_value(n) : -1;
    json_decref(v);
    return i;
}

/* The events after event `after`; checks that their numbers increase. */
static json_t *events_after(struct id id, int64_t after) {
    json_t *list = jobs_events(j, id.text, after, &err), *e;
    size_t i;
    assert_non_null(list);
    json_array_foreach (list, i, e) {
        int64_t seq = json_integer_value(json_object_get(e, "seq"));
        assert_true(seq > after);
        after = seq;
    }
    return list;
}

static json_t *event_of_type(const json_t *list, const char *type, int which) {
    size_t i;
    json_t *e;
    json_array_foreach (list, i, e)
        if (strcmp(json_get_string(e, "type"), type) == 0 && which-- == 0) return e;
    return NULL;
}

/* "queued running done": the states among the events. */
static const char *event_states(struct id id) {
    static char text[512];
    json_t *list = events_after(id, 0), *e;
    text[0] = 0;
    for (int i = 0; (e = event_of_type(list, "state", i)); i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "",
                 json_get_string(e, "state"));
    json_decref(list);
    return text;
}

static bool has_result(struct id id) {
    json_t *list = events_after(id, 0);
    bool has = event_of_type(list, "result", 0) != NULL;
    json_decref(list);
    return has;
}

/* Waits for the first output. */
static void await_result(struct id id) {
    UNTIL(has_result(id));
    if (!has_result(id)) fail_msg("no result");
}

/* The first result of a job; the caller releases it. */
static json_t *first_result(struct id id) {
    json_t *list = events_after(id, 0),
           *v = json_object_get(event_of_type(list, "result", 0), "result");
    json_incref(v);
    json_decref(list);
    return v;
}

/* Fields 14 and 15 of its stat; -1: ended, also if it is not reaped yet (states Z and X). */
static long cpu_ticks(pid_t pid) {
    char path[64], state = 'Z';
    long user = -1, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    int n = fscanf(f, "%*d (%*[^)]) %c %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d %ld %ld", &state,
                   &user, &system);
    fclose(f);
    return n == 3 && state != 'Z' && state != 'X' ? user + system : -1;
}

static void await_death(pid_t pid) {
    UNTIL(cpu_ticks(pid) < 0);
    if (cpu_ticks(pid) >= 0) fail_msg("process %d is still running", (int)pid);
}

/* running */

static void test_done(void **state) {
    (void)state;
    struct id id = submit("work", NULL);
    await_state(id, "done");
    assert_string_equal(event_states(id), "queued running done");
    json_t *list = events_after(id, 0), *v = job_get(id), *e = event_of_type(list, "progress", 0);
    assert_true(json_integer_value(json_object_get(json_array_get(list, 0), "seq")) == 1);
    e = json_object_get(e, "progress");
    assert_string_equal(json_get_string(e, "title"), "work");
    assert_int_equal(json_get_number(e, "done"), 25);
    assert_int_equal(json_get_number(e, "total"), 25);
    assert_true(json_get_number(e, "seconds_left") == 0);
    assert_true(json_equal(e, json_object_get(v, "progress")));
    e = json_object_get(event_of_type(list, "result", 0), "result");
    assert_int_equal(json_get_number(e, "answer"), 42);
    assert_string_equal(json_get_string(event_of_type(list, "result", 1), "text"),
                        "not JSON, and no end of line");
    assert_int_equal(json_get_number(v, "exit"), 0);
    assert_null(json_object_get(v, "note"));
    assert_null(json_object_get(v, "pid"));
    assert_int_equal(strlen(json_get_string(v, "started")), 20);
    assert_int_equal(strlen(json_get_string(v, "ended")), 20);
    assert_true(n_changed >= 3);
    json_decref(list);
    json_decref(v);
    char *path = jobs_file(j, id.text, "stdout.jsonl", &err);
    struct buf b = {0};
    assert_int_equal(file_read(path, 1000, &b, &err), OK);
    assert_string_equal(b.data, "{\"answer\":42}\nnot JSON, and no end of line");
    buf_release(&b);
    free(path);
}

/* Progress is reported while the job runs: at least twice, each time with its own event number. */
static void test_progress_while_running(void **state) {
    (void)state;
    struct id id = submit("work", NULL);
    int n_events = 0;
    for (int64_t seen = 0; !is_in_state(id, "done"); usleep(5000)) {
        json_t *list = events_after(id, seen), *e = event_of_type(list, "progress", 0);
        if (e) seen = json_integer_value(json_object_get(e, "seq"));
        n_events += e != NULL;
        json_decref(list);
    }
    assert_true(n_events >= 2);
}

static const json_t *series_find(const json_t *v, const char *name) {
    const json_t *one;
    size_t i;
    json_array_foreach (json_object_get(v, "series"), i, one)
        if (strcmp(json_get_string(one, "name"), name) == 0) return one;
    return NULL;
}

static double value_at(const json_t *series, const char *key, size_t i) {
    return json_number_value(json_array_get(json_object_get(series, key), i));
}

static void assert_figures(struct id id) {
    json_t *v = job_get(id), *last = json_object_get(v, "figures"),
           *s = jobs_metrics(j, id.text, &err);
    const json_t *loss = series_find(s, "train_loss"), *steps = series_find(s, "train_step");
    size_t n = json_array_size(json_object_get(loss, "at"));
    assert_int_equal(json_object_size(last), 2);
    assert_int_equal(json_get_number(last, "train_step"), 1000);
    assert_true(json_is_null(json_object_get(last, "train_loss")));
    assert_int_equal(json_array_size(json_object_get(s, "series")), 2);
    assert_string_equal(json_get_string(loss, "metric"), "shoal_train_loss");
    assert_int_equal(json_get_number(loss, "per"), 2);
    assert_int_equal(n, 500);
    assert_true(value_at(steps, "value", 0) == 1.5 && value_at(steps, "value", n - 1) == 999.5);
    assert_float_equal(value_at(loss, "value", 0), (1 + 1 / 2.) / 2, 1e-6);
    for (size_t i = 1; i < n; i++)
        assert_true(value_at(loss, "at", i) >= value_at(loss, "at", i - 1));
    assert_true(fabs(json_get_number(s, "began") + value_at(loss, "at", n - 1) - time(NULL)) < 60);
    json_decref(s);
    json_decref(v);
}

/* Metrics while the job runs, after its end, and after a restart. */
static void test_metrics(void **state) {
    (void)state;
    struct id id = submit("figures", path_in_dir("go")), silent = submit("silent", NULL);
    for (bool there = false; !there; usleep(5000)) {
        json_t *list = events_after(id, 0);
        there = event_of_type(list, "result", 0) != NULL;
        json_decref(list);
    }
    usleep(200000); /* values from earlier reports */
    assert_figures(id);
    close(open(path_in_dir("go"), O_WRONLY | O_CREAT, 0600));
    await_state(id, "done");
    assert_figures(id);
    reopen((struct jobs_options){0});
    assert_figures(id);
    json_t *none = jobs_metrics(j, silent.text, &err);
    assert_int_equal(json_array_size(json_object_get(none, "series")), 0);
    json_decref(none);
    assert_null(jobs_metrics(j, "job-00000000", &err));
    assert_int_equal(err.code, ERR_MISSING);
}

static void test_failures(void **state) {
    (void)state;
    struct id bad = submit("fail", NULL), silent = submit("silent", NULL),
              killed = submit("signal", NULL);
    await_state(bad, "failed");
    await_state(silent, "failed");
    await_state(killed, "failed");
    assert_string_equal(job_text(bad, "note"), "shoal world: cannot open 'x\xef\xbf\xbdy'");
    assert_int_equal(job_number(bad, "exit"), 2);
    assert_non_null(strstr(job_text(silent, "note"), "exit status 3"));
    assert_non_null(strstr(job_text(killed, "note"), "signal 10 (User defined signal 1)"));
    assert_int_equal(job_number(killed, "signal"), SIGUSR1);
    assert_string_equal(event_states(bad), "queued running failed");
    assert_true(n_changed >= 2);
    reopen((struct jobs_options){.program = "/nonexistent/shoal"});
    struct id none = submit("work", NULL);
    await_state(none, "failed");
    assert_string_equal(job_text(none, "note"),
                        "cannot run '/nonexistent/shoal': No such file or directory");
}

static void test_cancel(void **state) {
    (void)state;
    struct id id = submit("stubborn", NULL), waiting = submit("work", NULL);
    await_result(id);
    pid_t pid = job_number(id, "pid");
    assert_int_equal(jobs_cancel(j, waiting.text, &err), OK);
    assert_true(is_in_state(waiting, "cancelled"));
    double began = clock_now();
    assert_int_equal(jobs_cancel(j, id.text, &err), OK);
    assert_true(is_in_state(id, "running"));
    assert_int_equal(jobs_cancel(j, id.text, &err), OK);
    assert_int_equal(jobs_pause(j, id.text, &err), ERR_STATE);
    assert_int_equal(jobs_resume(j, id.text, &err), ERR_STATE);
    await_state(id, "cancelled");
    assert_true(clock_now() - began >= 0.3);
    json_t *helper = first_result(id);
    await_death(pid);
    await_death((pid_t)json_integer_value(helper));
    json_decref(helper);
    assert_int_equal(job_number(id, "signal"), SIGKILL);
    assert_string_equal(event_states(id), "queued running cancelled");
    struct id done = submit("lines", "1");
    await_state(done, "done");
    assert_int_equal(jobs_cancel(j, done.text, &err), ERR_STATE);
    assert_non_null(strstr(err.text, "is done and cannot be cancelled"));
}

static void test_remaining_processes_are_killed(void **state) {
    (void)state;
    struct id id = submit("leave", NULL);
    await_state(id, "done");
    json_t *left = first_result(id);
    await_death((pid_t)json_integer_value(left));
    json_decref(left);
}

/* Cancelling a paused job continues it, so that it ends without a SIGKILL. */
static void test_cancel_paused(void **state) {
    (void)state;
    reopen((struct jobs_options){.cancel_seconds = 1000});
    struct id id = submit("tidy", NULL);
    await_result(id);
    assert_int_equal(jobs_pause(j, id.text, &err), OK);
    assert_int_equal(jobs_cancel(j, id.text, &err), OK);
    await_state(id, "cancelled");
    assert_int_equal(job_number(id, "exit"), 9);
}

static void test_pause(void **state) {
    (void)state;
    struct id id = submit("spin", NULL), next = submit("lines", "1");
    await_result(id);
    pid_t pid = job_number(id, "pid");
    assert_int_equal(jobs_pause(j, id.text, &err), OK);
    assert_int_equal(jobs_pause(j, id.text, &err), OK);
    assert_true(is_in_state(id, "paused"));
    await_state(next, "done"); /* its slot is free */
    usleep(20000);
    long before = cpu_ticks(pid);
    usleep(300000);
    assert_int_equal(cpu_ticks(pid), before);
    assert_int_equal(jobs_delete(j, id.text, &err), ERR_STATE);
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "running");
    for (double until = clock_now() + 30; cpu_ticks(pid) < before + 5 && clock_now() < until;)
        usleep(10000);
    assert_true(cpu_ticks(pid) >= before + 5);
    assert_int_equal(job_number(id, "pid"), pid);
    assert_string_equal(event_states(id), "queued running paused queued running");
}

static void test_queue(void **state) {
    (void)state;
    struct id first = submit("wait", path_in_dir("go")), second = submit("lines", "1"),
              third = submit("lines", "1"), last = submit("lines", "1");
    await_result(first);
    assert_int_equal(jobs_pause(j, second.text, &err), OK);
    assert_true(is_in_state(third, "queued") && is_in_state(last, "queued"));
    json_t *list = jobs_list(j, NULL);
    assert_int_equal(json_array_size(list), 4);
    assert_string_equal(json_get_string(json_array_get(list, 0), "id"), last.text);
    assert_string_equal(json_get_string(json_array_get(list, 3), "id"), first.text);
    json_decref(list);
    touch("go");
    await_state(last, "done");
    assert_true(is_in_state(first, "done") && is_in_state(third, "done") &&
                is_in_state(second, "paused"));
    assert_string_equal(event_states(second), "queued paused");
    assert_int_equal(jobs_resume(j, second.text, &err), OK);
    await_state(second, "done");
}

/* Two run at once, never three, and each starts in queue order. */
static void test_max_running(void **state) {
    (void)state;
    reopen((struct jobs_options){.max_running = 2});
    struct id a = submit("wait", path_in_dir("a")), b = submit("wait", path_in_dir("b")),
              c = submit("wait", path_in_dir("c")), d = submit("lines", "1");
    await_result(a);
    await_result(b);
    assert_true(is_in_state(c, "queued"));
    touch("b");
    await_result(c);
    assert_true(is_in_state(a, "running") && is_in_state(d, "queued"));
    touch("a");
    await_state(d, "done");
    assert_true(is_in_state(c, "running"));
    touch("c");
    await_state(c, "done");
}

static void test_rerun(void **state) {
    (void)state;
    struct id id = submit("wait", path_in_dir("go"));
    await_result(id);
    assert_int_equal(jobs_cancel(j, id.text, &err), OK);
    await_state(id, "cancelled");
    struct id other = submit("wait", path_in_dir("other"));
    await_result(other);
    struct id third = submit("wait", path_in_dir("third"));
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    assert_true(is_in_state(id, "queued"));
    assert_int_equal(job_number(id, "signal"), -1);
    touch("other");
    await_result(third); /* it was submitted before the other was resumed */
    assert_true(is_in_state(id, "queued"));
    touch("third");
    touch("go");
    await_state(id, "done");
    assert_int_equal(job_number(id, "attempts"), 2);
    assert_int_equal(jobs_resume(j, id.text, &err), ERR_STATE);
    char *path = jobs_file(j, id.text, "stdout.jsonl", &err);
    assert_true(path_exists(path));
    assert_int_equal(jobs_delete(j, id.text, &err), OK);
    assert_false(path_exists(path));
    assert_null(jobs_get(j, id.text, &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_int_equal(jobs_delete(j, id.text, &err), ERR_MISSING);
    assert_null(jobs_events(j, id.text, 0, &err));
    assert_null(jobs_file(j, id.text, "stdout.jsonl", &err));
    free(path);
    reopen((struct jobs_options){0});
    assert_null(jobs_get(j, id.text, &err));
    assert_true(is_in_state(other, "done"));
}

/* requests */

static int submit_by(const char *text, struct job_caller *caller, char id[JOB_ID_LEN]) {
    json_t *v = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    assert_non_null(v);
    int rc = jobs_submit(j, v, caller, id, &err);
    json_decref(v);
    return rc;
}

static int submit_text(const char *text, const char *key, char id[JOB_ID_LEN]) {
    struct job_caller caller = {.idempotency_key = key};
    return submit_by(text, &caller, id);
}

/* Submits "wait FILE" with more keys of the request, for an owner. */
static struct id submit_wait(const char *file, const char *more, const char *owner) {
    struct id id;
    struct job_caller caller = {.owner = owner};
    char *text =
        xasprintf("{\"kind\":\"eval\",\"args\":[\"wait\",\"%s\"]%s}", path_in_dir(file), more);
    if (submit_by(text, &caller, id.text) != OK) fail_msg("%s", err.text);
    free(text);
    return id;
}

/* A higher priority goes first; owners take turns; then the order of the queue decides. */
static void test_turns(void **state) {
    (void)state;
    struct id running = submit_wait("go", "", "ann");
    await_state(running, "running");
    struct id low = submit_wait("a", ",\"priority\":-1", "cid"), ann1 = submit_wait("b", "", "ann"),
              ann2 = submit_wait("c", "", "ann"), bob = submit_wait("d", "", "bob"),
              high = submit_wait("e", ",\"priority\":7", "ann");
    const struct id order[] = {running, high, bob, ann1, ann2, low};
    static const char *const files[] = {"go", "e", "d", "b", "c", "a"};
    for (size_t i = 0; i < ARRAY_LEN(order); i++) {
        await_state(order[i], "running");
        for (size_t k = i + 1; k < ARRAY_LEN(order); k++)
            assert_true(is_in_state(order[k], "queued"));
        touch(files[i]);
    }
    await_state(low, "done");
    assert_int_equal(job_number(high, "priority"), 7);
}

/* With two slots, the owner without a running job gets the second one. */
static void test_fair_share(void **state) {
    (void)state;
    reopen((struct jobs_options){.max_running = 2});
    struct id first = submit_wait("a", "", "ann"), second = submit_wait("b", "", "ann");
    await_state(first, "running");
    await_state(second, "running");
    struct id third = submit_wait("c", "", "ann"), bob1 = submit_wait("d", "", "bob"),
              bob2 = submit_wait("e", "", "bob");
    touch("a");
    await_state(bob1, "running");
    assert_true(is_in_state(third, "queued") && is_in_state(bob2, "queued"));
    touch("b");
    await_state(third, "running");
    assert_true(is_in_state(bob2, "queued"));
    touch("c"), touch("d"), touch("e");
    await_state(bob2, "done");
}

static void test_retries(void **state) {
    (void)state;
    struct id id, other;
    reopen((struct jobs_options){.retry_seconds = 0.05});
    assert_int_equal(
        submit_text("{\"kind\":\"eval\",\"args\":[\"silent\",\"\"],\"retries\":2}", NULL, id.text),
        OK);
    await_state(id, "failed");
    assert_int_equal(job_number(id, "attempts"), 3);
    assert_int_equal(job_number(id, "retried"), 2);
    assert_string_equal(event_states(id), "queued running queued running queued running failed");
    json_t *dead = jobs_list(j, "failed");
    assert_int_equal(json_array_size(dead), 1);
    json_decref(dead);
    assert_true(job_state_exists("failed") && !job_state_exists("dead"));
    /* the client may try again, with all retries */
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "failed");
    assert_int_equal(job_number(id, "attempts"), 6);
    /* a wrong command line is wrong again */
    assert_int_equal(
        submit_text("{\"kind\":\"eval\",\"args\":[\"fail\",\"\"],\"retries\":2}", NULL, other.text),
        OK);
    await_state(other, "failed");
    assert_int_equal(job_number(other, "attempts"), 1);
}

/* A job that waits for its retry can be cancelled, gives its slot to others, and is tried again
 * after a restart. */
static void test_retry_pause(void **state) {
    (void)state;
    struct id id, cancelled;
    static const char *const text = "{\"kind\":\"eval\",\"args\":[\"silent\",\"\"],\"retries\":1}";
    reopen((struct jobs_options){.retry_seconds = 1000});
    assert_int_equal(submit_text(text, NULL, id.text), OK);
    assert_int_equal(submit_text(text, NULL, cancelled.text), OK);
    struct id last = submit("lines", "1");
    await_state(last, "done");
    assert_true(is_in_state(id, "queued") && is_in_state(cancelled, "queued"));
    assert_non_null(strstr(job_text(id, "note"), "attempt 1 failed"));
    assert_int_equal(jobs_cancel(j, cancelled.text, &err), OK);
    assert_true(is_in_state(cancelled, "cancelled"));
    reopen((struct jobs_options){0});
    await_state(id, "failed");
    assert_int_equal(job_number(id, "attempts"), 2);
}

/* A job that is late fails with that reason: one that runs is stopped, one that waits is not
 * started. Retries do not follow. */
static void test_deadline(void **state) {
    (void)state;
    struct id late = submit_wait("never", ",\"deadline\":2,\"retries\":3", NULL),
              queued = submit_wait("never", ",\"deadline\":2", NULL),
              paused = submit_wait("never", ",\"deadline\":2", NULL),
              in_time = submit_wait("go", ",\"deadline\":600", NULL);
    assert_int_equal(jobs_pause(j, paused.text, &err), OK);
    await_state(late, "failed");
    assert_non_null(strstr(job_text(late, "note"), "stopped at its deadline of 2 seconds"));
    await_state(queued, "failed");
    assert_non_null(strstr(job_text(queued, "note"), "not started within its deadline"));
    await_state(paused, "failed");
    touch("go");
    await_state(in_time, "done");
    reopen((struct jobs_options){0}); // deadlines survive a restart
    assert_int_equal(jobs_resume(j, queued.text, &err), OK);
    await_state(queued, "failed");
    assert_non_null(strstr(job_text(queued, "note"), "stopped at its deadline"));
}

static void test_idempotency(void **state) {
    (void)state;
    struct id a, b;
    assert_int_equal(submit_text("{\"kind\":\"eval\",\"args\":[\"lines\",\"1\"]}", "k1", a.text),
                     OK);
    assert_int_equal(
        submit_text("{\"args\":[\"lines\",\"1\"],\"options\":{},\"kind\":\"eval\"}", "k1", b.text),
        OK);
    assert_string_equal(a.text, b.text);
    assert_int_equal(submit_text("{\"kind\":\"eval\",\"args\":[\"lines\",\"2\"]}", "k1", b.text),
                     ERR_MISMATCH);
    assert_non_null(strstr(err.text, a.text));
    assert_int_equal(submit_text("{\"kind\":\"eval\",\"args\":[\"lines\",\"1\"]}", "k2", b.text),
                     OK);
    assert_string_not_equal(a.text, b.text);
    await_state(b, "done");
    reopen((struct jobs_options){0}); /* also tomorrow */
    assert_int_equal(submit_text("{\"kind\":\"eval\",\"args\":[\"lines\",\"1\"]}", "k2", b.text),
                     OK);
    json_t *list = jobs_list(j, NULL);
    assert_int_equal(json_array_size(list), 2);
    json_decref(list);
    char key[400];
    memset(key, 'k', sizeof key);
    key[sizeof key - 1] = 0;
    assert_int_equal(submit_text("{\"kind\":\"eval\"}", key, b.text), ERR_USAGE);
    assert_int_equal(submit_text("{\"kind\":\"eval\"}", "", b.text), ERR_USAGE);
}

static void test_command_line(void **state) {
    (void)state;
    static const char *const wanted[] = {"shoal",        "world",
                                         "--adapters=a", "--adapters=--out",
                                         "--adapters=2", "--no-breed",
                                         "--exact",      "--generations=3",
                                         "--lr=0.1",     "--name=; rm -rf $HOME",
                                         "--json",       "--quiet",
                                         "--",           "show",
                                         "--out=x"};
    struct id id;
    assert_int_equal(submit_text("{\"kind\":\"world\",\"args\":[\"show\",\"--out=x\"],\"options\":"
                                 "{\"generations\":3,\"breed\":false,\"exact\":true,\"lr\":0.1,"
                                 "\"adapters\":[\"a\",\"--out\",2],\"none\":[],"
                                 "\"name\":\"; rm -rf $HOME\"}}",
                                 NULL, id.text),
                     OK);
    await_state(id, "done");
    json_t *v = first_result(id);
    assert_int_equal(json_array_size(v), ARRAY_LEN(wanted));
    for (size_t i = 0; i < ARRAY_LEN(wanted); i++)
        assert_string_equal(json_string_value(json_array_get(v, i)), wanted[i]);
    json_decref(v);
}

/* Existing files are "here" and "there.jsonl"; "closed" may not be read. */
static char *input(void *ctx, const char *path, bool database, struct error *e) {
    (void)ctx, (void)database;
    if (strcmp(path, "here") == 0) return xstrdup("/real/here");
    if (strcmp(path, "there.jsonl") == 0) return xstrdup("/real/there.jsonl");
    bool closed = strcmp(path, "closed") == 0;
    error_set(e, closed ? ERR_USAGE : ERR_MISSING, "'%s' is not for jobs", path);
    return NULL;
}

static void test_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *field;
    } bad[] = {
        {"[]", ""},
        {"{}", "kind"},
        {"{\"kind\":\"pull\"}", "kind"},
        {"{\"kind\":7}", "kind"},
        {"{\"kind\":\"world\",\"program\":\"sh\"}", "program"},
        {"{\"kind\":\"world\",\"args\":\"a\"}", "args"},
        {"{\"kind\":\"world\",\"args\":[1]}", "args"},
        {"{\"kind\":\"world\",\"args\":[\"a\\u0000b\"]}", "args"},
        {"{\"kind\":\"world\",\"args\":[\"export\",\"a/b\"]}", "args"},
        {"{\"kind\":\"world\",\"args\":[\"export\",\"a\",\"b\"]}", "args"},
        {"{\"kind\":\"world\",\"options\":[]}", "options"},
        {"{\"kind\":\"world\",\"options\":{\"a=b\":\"c\"}}", "a=b"},
        {"{\"kind\":\"world\",\"options\":{\"\":\"c\"}}", ""},
        {"{\"kind\":\"world\",\"options\":{\"-x\":true}}", "-x"},
        {"{\"kind\":\"world\",\"options\":{\"Steps\":1}}", "Steps"},
        {"{\"kind\":\"world\",\"options\":{\"no-lr\":true}}", "no-lr"},
        {"{\"kind\":\"world\",\"options\":{\"no-breed\":\"x\"}}", "no-breed"},
        {"{\"kind\":\"world\",\"options\":{\"lr\":true}}", "lr"},
        {"{\"kind\":\"world\",\"options\":{\"lr\":[1]}}", "lr"},
        {"{\"kind\":\"world\",\"options\":{\"lr\":1,\"no_breed\":true,\"breed\":true}}", "breed"},
        {"{\"kind\":\"world\",\"options\":{\"policy_pipe\":\"sh\"}}", "policy-pipe"},
        {"{\"kind\":\"world\",\"options\":{\"policy-pipe\":\"sh\"}}", "policy-pipe"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"shell:id\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"exact:\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"tests\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"sql:a.db\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"json-schema:/etc/passwd\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"reward\":\"question:x\"}}", "reward"},
        {"{\"kind\":\"world\",\"options\":{\"config\":\"/etc/passwd\"}}", "config"},
        {"{\"kind\":\"world\",\"options\":{\"json\":false}}", "json"},
        {"{\"kind\":\"world\",\"options\":{\"no-json\":true}}", "json"},
        {"{\"kind\":\"world\",\"options\":{\"runs\":\"/tmp\"}}", "runs"},
        {"{\"kind\":\"world\",\"options\":{\"forgotten\":\"x\"}}", "forgotten"},
        {"{\"kind\":\"world\",\"options\":{\"secrets\":\"x\"}}", "secrets"},
        {"{\"kind\":\"world\",\"options\":{\"threads\":5}}", "threads"},
        {"{\"kind\":\"world\",\"options\":{\"threads\":\"5\"}}", "threads"},
        {"{\"kind\":\"world\",\"options\":{\"name\":null}}", "name"},
        {"{\"kind\":\"world\",\"options\":{\"name\":{}}}", "name"},
        {"{\"kind\":\"world\",\"options\":{\"policy\":[[\"b\"]]}}", "policy"},
        {"{\"kind\":\"world\",\"options\":{\"name\":\"b\\u0000c\"}}", "name"},
        {"{\"kind\":\"world\",\"options\":{\"id\":\"../x\"}}", "id"},
        {"{\"kind\":\"train\",\"options\":{\"out\":\"/etc\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"out\":\"/results/../x\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"out\":\".\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"output-dir\":\"a/b\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"output-dir\":\"a\",\"out\":\"b\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"report\":\"a\",\"out\":\"a\"}}", "out"},
        {"{\"kind\":\"train\",\"options\":{\"model\":\"gone\"}}", "model"},
        {"{\"kind\":\"train\",\"options\":{\"model\":\"closed\"}}", "model"},
        {"{\"kind\":\"train\",\"options\":{\"data\":[\"../../esc=here\"]}}", "data"},
        {"{\"kind\":\"train\",\"options\":{\"data\":[\"a=closed\"]}}", "data"},
        {"{\"kind\":\"train\",\"options\":{\"data\":[\"fry:../x\"]}}", "data"},
        {"{\"kind\":\"train\",\"options\":{\"tasks\":\"pick,closed\"}}", "tasks"},
        {"{\"kind\":\"train\",\"options\":{\"tasks\":\"pick,a/b\"}}", "tasks"},
    };
    struct id id;
    struct job_caller caller = {0};
    struct job_request_rules rules = {
        .results_dir = "/results", .resolve_input = input, .kinds = kinds, .max_threads = 4};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct job_request checked;
        json_t *v = json_loads(bad[i].text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        if (job_request_check(&rules, v, &checked, caller.field, &err) == OK)
            fail_msg("%s", bad[i].text);
        assert_int_equal(err.code, ERR_USAGE);
        if (strcmp(caller.field, bad[i].field) != 0) fail_msg("%s: %s", bad[i].text, caller.field);
        json_decref(v);
    }
    reopen((struct jobs_options){.max_jobs = 2});
    json_t *args = json_array(), *request = json_pack("{s:s,s:o}", "kind", "world", "args", args);
    for (int i = 0; i < 2000; i++) json_array_append_new(args, json_string("x"));
    assert_int_equal(jobs_submit(j, request, &caller, id.text, &err), ERR_USAGE);
    json_decref(request);
    json_t *list = jobs_list(j, NULL);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    await_state(submit("lines", "1"), "done");
    await_state(submit("lines", "1"), "done");
    assert_int_equal(submit_text("{\"kind\":\"eval\"}", NULL, id.text), ERR_STATE);
    assert_non_null(strstr(err.text, "delete some"));
}

static void assert_checked(const char *text, const char *asked, const char *resolved,
                           bool commands) {
    struct job_request r;
    struct job_request_rules rules = {.results_dir = "/results",
                                      .resolve_input = input,
                                      .kinds = kinds,
                                      .max_threads = 4,
                                      .allow_commands = commands,
                                      .owner = "key-1"};
    json_t *v = json_loads(text, 0, NULL), *wanted[2];
    if (job_request_check(&rules, v, &r, NULL, &err) != OK) fail_msg("%s: %s", text, err.text);
    wanted[0] = json_loads(asked, 0, NULL);
    wanted[1] = json_loads(resolved, 0, NULL);
    if (!json_equal(r.normalized, wanted[0])) fail_msg("%s: %s", text, json_dumps(r.normalized, 0));
    if (!json_equal(r.resolved, wanted[1])) fail_msg("%s: %s", text, json_dumps(r.resolved, 0));
    json_decref(v);
    v = json_incref(r.normalized); /* the stored request is checked again */
    job_request_release(&r);
    assert_int_equal(job_request_check(&rules, v, &r, NULL, &err), OK);
    assert_true(json_equal(r.normalized, wanted[0]) && json_equal(r.resolved, wanted[1]));
    job_request_release(&r);
    json_decref(wanted[0]);
    json_decref(wanted[1]);
    json_decref(v);
}

/* Options have their canonical names, results are in the folder of results, and inputs have
 * resolved paths. */
static void test_resolved(void **state) {
    (void)state;
    assert_checked("{\"kind\":\"train\",\"options\":{\"output_dir\":\"x\",\"no-breed\":true,"
                   "\"model\":\"here\",\"lr\":1,\"threads\":4}}",
                   "{\"kind\":\"train\",\"args\":[],\"options\":{\"out\":\"/results/x\","
                   "\"breed\":false,\"model\":\"here\",\"lr\":1,\"threads\":4}}",
                   "{\"kind\":\"train\",\"args\":[],\"options\":{\"out\":\"/results/x\","
                   "\"breed\":false,\"model\":\"/real/here\",\"lr\":1,\"threads\":4}}",
                   false);
    assert_checked("{\"kind\":\"world\",\"args\":[\"export\",\"x\"],\"options\":{\"data\":["
                   "\"a=here\",\"fry:pick:3\",\"b=fry:odd\"],\"tasks\":\"pick,there.jsonl\"}}",
                   "{\"kind\":\"world\",\"args\":[\"export\",\"/results/x\"],\"options\":{"
                   "\"data\":[\"a=here\",\"fry:pick:3\",\"b=fry:odd\"],"
                   "\"tasks\":\"pick,there.jsonl\"}}",
                   "{\"kind\":\"world\",\"args\":[\"export\",\"/results/x\"],\"options\":{"
                   "\"data\":[\"a=/real/here\",\"fry:pick:3\",\"b=fry:odd\"],"
                   "\"tasks\":\"pick,/real/there.jsonl\"}}",
                   false);
    assert_checked("{\"kind\":\"eval\",\"options\":{\"conversation\":\"me\"}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"conversation\":\"me\"}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"conversation\":\"key-1/me\"}}",
                   false);
    assert_checked("{\"kind\":\"eval\",\"options\":{\"lora\":[\"here\"]}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"adapter\":[\"here\"]}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"adapter\":[\"/real/here\"]}}",
                   false);
    assert_checked("{\"kind\":\"eval\",\"options\":{\"lora\":\"f16\"}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"lora-dtype\":\"f16\"}}",
                   "{\"kind\":\"eval\",\"args\":[],\"options\":{\"lora-dtype\":\"f16\"}}", false);
    static const char rewards[] = "{\"kind\":\"eval\",\"args\":[],\"options\":{\"reward\":"
                                  "\"shell:id\"}}";
    assert_checked(rewards, rewards, rewards, true);
    static const char calculator[] = "{\"kind\":\"eval\",\"args\":[],\"options\":{\"reward\":"
                                     "\"calculator\"}}";
    assert_checked(calculator, calculator, calculator, false);
}

/* Every option of training is the same option under each of its names: the aliases, which are names
 * of PEFT and TRL, and all of them with '_' for '-'. */
static void test_option_names(void **state) {
    (void)state;
    struct option_row *table = options_join(NULL, train_settings_tables);
    const struct job_kind one[] = {{"train", NULL, NULL, table, any_args}, {0}};
    const struct job_request_rules rules = {.kinds = one};
    int n = 0;
    for (const struct option_row *row = table; row->name; row++) {
        const struct option_row *wanted = option_find(table, row->name);
        bool number = wanted->type == OPT_INT || wanted->type == OPT_FLOAT;
        if (!number && wanted->type != OPT_BOOL) continue;
        for (int underscores = 0; underscores < 2; underscores++, n++) {
            char *name = xstrdup(row->name);
            struct job_request r;
            for (char *p = name; underscores && *p; p++) *p = *p == '-' ? '_' : *p;
            json_t *v = json_pack("{s:s,s:{s:o}}", "kind", "train", "options", name,
                                  number ? json_integer(1) : json_true());
            bool allowed = wanted->job_policy != JOB_ARG_FORBIDDEN;
            int rc = job_request_check(&rules, v, &r, NULL, &err);
            if (rc != (allowed ? OK : ERR_USAGE)) fail_msg("%s: %s", name, err.text);
            if (rc == OK) {
                assert_non_null(
                    json_object_get(json_object_get(r.resolved, "options"), wanted->name));
                job_request_release(&r);
            }
            json_decref(v);
            free(name);
        }
    }
    assert_true(n > 100 && option_find(table, "per_device_train_batch_size") != NULL);
    free(table);
}

static int submit_act_with_output(const char *act, const char *arg, const char *name,
                                  struct job_caller *caller, char id[JOB_ID_LEN]) {
    char *text =
        xasprintf("{\"kind\":\"world\",\"args\":[\"%s\",\"%s\"],\"options\":{\"out\":\"%s\"}}", act,
                  arg, name);
    int rc = submit_by(text, caller, id);
    free(text);
    return rc;
}

static int submit_with_output(const char *name, const char *owner, bool any, char id[JOB_ID_LEN]) {
    struct job_caller caller = {.owner = owner, .may_replace_any = any};
    return submit_act_with_output("lines", "1", name, &caller, id);
}

/* Only jobs of the same key may replace a job's output, also after the job is deleted and after a
 * restart; no job may replace other files. */
static void test_output_owners(void **state) {
    (void)state;
    struct id id;
    char *out = xstrdup(path_in_dir("out"));
    struct jobs_options o = {.rules.results_dir = out};
    reopen(o);
    struct job_caller first = {.owner = "key-1"};
    assert_int_equal(submit_act_with_output("wait", path_in_dir("go"), "a", &first, id.text), OK);
    assert_int_equal(submit_with_output("a", "key-2", false, id.text),
                     ERR_STATE); /* its output may still be written */
    assert_int_equal(submit_with_output("a", "key-1", false, id.text), OK);
    touch("go");
    await_state(id, "done");
    assert_int_equal(submit_with_output("a", "key-2", false, id.text), OK); /* it was not written */
    await_state(id, "done");
    touch("out/a");
    assert_int_equal(jobs_delete(j, id.text, &err), OK);
    assert_int_equal(submit_with_output("a", "key-1", false, id.text), ERR_STATE);
    assert_non_null(strstr(err.text, "choose another name"));
    assert_int_equal(submit_with_output("a", NULL, false, id.text), ERR_STATE);
    reopen(o);
    assert_int_equal(submit_with_output("a", "key-1", false, id.text), ERR_STATE);
    assert_int_equal(submit_with_output("a", "key-2", false, id.text), OK);
    assert_false(jobs_may_replace(j, id.text));
    assert_int_equal(submit_with_output("a", "key-3", true, id.text), OK);
    assert_true(jobs_may_replace(j, id.text));
    touch("out/b");
    assert_int_equal(submit_with_output("b", "key-1", false, id.text), ERR_STATE);
    assert_int_equal(symlink("/nowhere", path_in_dir("out/c")), 0);
    assert_int_equal(submit_with_output("c", "key-1", false, id.text), ERR_STATE);
    jobs_close(j);
    j = NULL;
    unlink(path_in_dir("go"));
    unlink(path_in_dir("out/a"));
    unlink(path_in_dir("out/b"));
    unlink(path_in_dir("out/c"));
    rmdir(out);
    free(out);
}

/* Idempotency keys, queue and storage limits are separate for each API key. */
static void test_limits_by_owner(void **state) {
    (void)state;
    struct id a, b;
    struct job_caller one = {.idempotency_key = "k", .owner = "key-1"},
                      two = {.idempotency_key = "k", .owner = "key-2"};
    reopen((struct jobs_options){.max_queued = 2, .max_kept = 1 << 20});
    struct id first = submit("wait", path_in_dir("go"));
    await_result(first);
    static const char *const text = "{\"kind\":\"eval\",\"args\":[\"wide\",\"8\"]}";
    assert_int_equal(submit_by(text, &one, a.text), OK);
    assert_int_equal(submit_by(text, &two, b.text), OK);
    assert_string_not_equal(a.text, b.text);
    one.idempotency_key = NULL;
    assert_int_equal(submit_by(text, &one, b.text), OK);
    assert_int_equal(submit_by(text, &one, b.text), ERR_MEMORY); /* two wait */
    two.idempotency_key = NULL;
    assert_int_equal(submit_by(text, &two, b.text), OK);
    touch("go");
    await_state(a, "done");
    await_state(b, "done");
    /* key-1 and key-2 have written 1.6 MB each, with a limit of 1 MB */
    assert_int_equal(submit_by(text, &one, b.text), ERR_MEMORY);
    assert_non_null(strstr(err.text, "--jobs-bytes"));
}

/* A job's time limit does not run while it is paused; at the limit the job fails with that
 * reason. */
static void test_time_limit(void **state) {
    (void)state;
    reopen((struct jobs_options){.max_seconds = 0.4, .cancel_seconds = 0.2});
    struct id id = submit("stubborn", NULL);
    await_result(id);
    assert_int_equal(jobs_pause(j, id.text, &err), OK);
    usleep(800000);
    assert_true(is_in_state(id, "paused"));
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "failed");
    assert_non_null(strstr(job_text(id, "note"), "--job-seconds"));
    reopen((struct jobs_options){.max_seconds = 600});
    id = submit("lines", "1");
    await_state(id, "done");
}

static int readable(const struct job_paths *p, const char *name, bool database) {
    char *path = job_paths_resolve(p, path_in_dir(name), database, &err);
    int rc = path ? OK : err.code;
    free(path);
    return rc;
}

/* The rule with the longest path decides; a link counts as its target. */
static void test_paths(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int named, base, read, write; /* as an input, a database; by the program: read, written */
    } cases[] = {
        {"open/a.jsonl", OK, ERR_USAGE, OK, ERR_USAGE},
        {"open", OK, ERR_USAGE, OK, ERR_USAGE},
        {"open/in", OK, ERR_USAGE, OK, ERR_USAGE},
        {"open/in/../a.jsonl", OK, ERR_USAGE, OK, ERR_USAGE},
        {"open/../closed.txt", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/gone.jsonl", ERR_MISSING, ERR_MISSING, OK, ERR_USAGE},
        {"open/key.pem", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/.env", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/.git/a.txt", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/k.db", ERR_USAGE, OK, ERR_USAGE, ERR_USAGE},
        {"open/fifo.jsonl", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/link.jsonl", OK, ERR_USAGE, OK, ERR_USAGE},
        {"open/escape.jsonl", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/outside/closed.txt", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/state/a.jsonl", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
        {"open/state/out/a.jsonl", OK, ERR_USAGE, OK, OK},
        {"open/state/out/lock", ERR_USAGE, ERR_USAGE, OK, OK},
        {"open/state/out/new", ERR_MISSING, ERR_MISSING, OK, OK},
        {"open/state/out/.versions/new", ERR_MISSING, ERR_MISSING, OK, OK},
        {"open/state/out/.x", ERR_MISSING, ERR_MISSING, OK, ERR_USAGE},
        {"open/state/out/../new", ERR_MISSING, ERR_MISSING, OK, ERR_USAGE},
        {"open/state/out/k.db", ERR_USAGE, ERR_USAGE, ERR_USAGE, OK},
        {"opener.txt", ERR_USAGE, ERR_USAGE, ERR_USAGE, ERR_USAGE},
    };
    static const char *const files[] = {"open/a.jsonl",        "closed.txt",
                                        "open/key.pem",        "open/.env",
                                        "open/.git/a.txt",     "open/k.db",
                                        "open/state/a.jsonl",  "opener.txt",
                                        "open/state/out/lock", "open/state/out/a.jsonl",
                                        "open/state/out/k.db"};
    static const char *const folders[] = {"open/in", "open/.git", "open/state/out"};
    struct job_paths p = {0}, again;
    for (size_t i = 0; i < ARRAY_LEN(folders); i++)
        assert_int_equal(dir_make(path_in_dir(folders[i]), &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(files); i++) touch(files[i]);
    assert_int_equal(mkfifo(path_in_dir("open/fifo.jsonl"), 0600), 0);
    assert_int_equal(symlink("a.jsonl", path_in_dir("open/link.jsonl")), 0);
    assert_int_equal(symlink("../closed.txt", path_in_dir("open/escape.jsonl")), 0);
    assert_int_equal(symlink("..", path_in_dir("open/outside")), 0);
    job_paths_add(&p, path_in_dir("open"), PATH_READ);
    job_paths_add(&p, path_in_dir("open/state"), PATH_DENIED);
    job_paths_add(&p, path_in_dir("open/state/out"), PATH_WRITE);
    json_t *v = job_paths_json(&p);
    assert_int_equal(job_paths_parse(&again, v, &err), OK);
    json_decref(v);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const int got[] = {
            readable(&again, cases[i].name, false), readable(&again, cases[i].name, true),
            job_paths_check(&again, path_in_dir(cases[i].name), PATH_USE_READ, &err),
            job_paths_check(&again, path_in_dir(cases[i].name), PATH_USE_WRITE, &err)};
        const int wanted[] = {cases[i].named, cases[i].base, cases[i].read, cases[i].write};
        for (int k = 0; k < 4; k++)
            if (got[k] != wanted[k]) fail_msg("%s, %d: %d", cases[i].name, k, got[k]);
    }
    assert_int_equal(job_paths_check(&again, "/proc/1/environ", PATH_USE_READ, &err), ERR_USAGE);
    assert_int_equal(job_paths_check(&again, "/proc/self/environ", PATH_USE_READ, &err), ERR_USAGE);
    assert_int_equal(job_paths_check(&again, "/proc/self/status", PATH_USE_READ, &err), OK);
    job_paths_release(&p);
    job_paths_release(&again);
    tree_delete(path_in_dir("open"));
    assert_false(path_exists(path_in_dir("open")));
    assert_true(path_exists(path_in_dir("closed.txt"))); /* links are not followed */
}

/* bounds */

static void test_many_events(void **state) {
    (void)state;
    struct id id = submit("lines", "100000"), other = submit("work", NULL);
    await_state(id, "done");
    await_state(other, "done");
    json_t *list = events_after(id, 0);
    size_t n = json_array_size(list);
    assert_true(n > 1000 && n <= 4096);
    /* The newest events are returned, each with its number. */
    json_t *last = event_of_type(list, "state", 0), *before = json_array_get(list, n - 2);
    assert_string_equal(json_get_string(last, "state"), "done");
    assert_int_equal(json_get_number(json_object_get(before, "result"), "i"), 99999);
    assert_int_equal(json_get_number(last, "seq"), 100000 + 3);
    json_decref(list);
    list = events_after(id, 100000);
    assert_int_equal(json_array_size(list), 3);
    json_decref(list);
    struct id third = submit("lines", "100000");
    await_state(third, "done");
    assert_string_equal(event_states(other), "done"); /* always there */
    size_t rss = process_memory("VmRSS");
    for (int i = 0; i < 3; i++) await_state(submit("lines", "100000"), "done");
    assert_true(process_memory("VmRSS") < rss + (8 << 20));
    struct id wide = submit("wide", "60");
    await_state(wide, "done");
    list = events_after(wide, 0);
    assert_in_range(json_array_size(list), 15,
                    22); /* of 60 results, as many as fit into two megabytes */
    json_decref(list);
}

static void test_long_output(void **state) {
    (void)state;
    struct id line = submit("long-line", NULL);
    await_state(line, "done");
    json_t *list = events_after(line, 0);
    assert_int_equal(json_get_number(event_of_type(list, "result", 0), "bytes"), 4096 * 4096);
    assert_int_equal(json_get_number(event_of_type(list, "result", 1), "result"), 1);
    json_decref(list);
    reopen((struct jobs_options){.max_output = 100000});
    struct id id = submit("flood", NULL);
    await_state(id, "failed");
    assert_non_null(strstr(job_text(id, "note"), "results are too long"));
    char *path = jobs_file(j, id.text, "stdout.jsonl", &err);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 100000);
    free(path);
}

static void test_garbage_progress(void **state) {
    (void)state;
    struct id id = submit("garbage", NULL);
    await_state(id, "done");
    json_t *list = events_after(id, 0),
           *p = json_object_get(event_of_type(list, "progress", 0), "progress");
    size_t n = strlen(json_get_string(p, "title"));
    assert_true(n > 190 && n <= 200 && n % 3 == 0); /* cut between two characters */
    assert_int_equal(json_get_number(p, "done"), 5);
    assert_null(json_object_get(p, "seconds_left"));
    json_decref(list);
}

/* The program's side of the pipe in SHOAL_PROGRESS: valid lines at a limited rate; a descriptor
 * that is not a pipe is left alone. */
static size_t ticks_reported(const char *number, int fd, struct buf *out) {
    struct error none;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("SHOAL_PROGRESS", number, 1);
        dup2(fd < 0 ? ends[1] : fd, 90);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "shoal", "world", "--", "ticks", (char *)NULL);
        _exit(1);
    }
    close(ends[1]);
    int status;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", ends[0]);
    assert_int_equal(file_read(path, 1 << 20, out, &none), OK);
    close(ends[0]);
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    size_t lines = 0;
    for (size_t i = 0; i < out->len; i++) lines += out->data[i] == '\n';
    return lines;
}

static void test_progress_pipe(void **state) {
    (void)state;
    struct buf b = {0};
    size_t n = ticks_reported("90", -1, &b);
    if (n < 3 || n > 7) fail_msg("%zu lines: %s", n, b.data);
    char *last = b.data;
    for (char *end; (end = strchr(last, '\n')) && end[1]; last = end + 1) *end = 0;
    json_t *v = json_loads(last, 0, NULL);
    assert_string_equal(json_get_string(v, "title"), "ticks \"\xef\xbf\xbd");
    assert_true(json_get_number(v, "done") > 100);
    assert_int_equal(json_get_number(v, "total"), 1000000000);
    assert_true(json_get_number(v, "seconds") > 1 && json_get_number(v, "left") > 1);
    json_decref(v);
    static const char *const bad[] = {"", "90x", "-90", "99999999999999999999", "1000"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        b.len = 0;
        assert_int_equal(ticks_reported(bad[i], -1, &b), 0);
    }
    int fd = open(path_in_dir("file"), O_RDWR | O_CREAT, 0600);
    b.len = 0;
    assert_int_equal(ticks_reported("90", fd, &b), 0);
    assert_int_equal(lseek(fd, 0, SEEK_END), 0);
    close(fd);
    buf_release(&b);
}

/* A job gets a new environment without secrets and settings of the server. */
static void test_environment(void **state) {
    (void)state;
    static const char *const names[] = {"SHOAL_CONFIG",  "SHOAL_ALL_THREADS", "SHOAL_WORLD_STEPS",
                                        "SHOAL_API_KEY", "HF_TOKEN",          "SHOAL_ALERT_SLACK",
                                        "LD_PRELOAD_X",  "HTTPS_PROXY",       "SHOAL_JOB"};
    static const char *const passed[] = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "SHOAL_CPU"};
    static const char *const known[] = {"PATH",
                                        "HOME",
                                        "LANG",
                                        "LANGUAGE",
                                        "TZ",
                                        "LC_",
                                        "LD_LIBRARY_PATH",
                                        "SHOAL_CPU",
                                        "SHOAL_PROGRESS",
                                        "SHOAL_CONFIG",
                                        "SHOAL_JOB",
                                        "TMPDIR",
                                        "SHOAL_CACHE",
                                        "XDG_CACHE_HOME"};
    const char *name;
    json_t *text;
    struct jobs_options o = {.permissions = "{}"};
    reopen(o);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) setenv(names[i], "7", 1);
    for (size_t i = 0; i < ARRAY_LEN(passed); i++)
        setenv(passed[i], getenv(passed[i]) ? getenv(passed[i]) : "", 1);
    struct id id = submit("settings", NULL);
    await_state(id, "done");
    json_t *v = first_result(id);
    json_object_foreach (v, name, text) {
        bool is = false;
        for (size_t i = 0; i < ARRAY_LEN(known); i++)
            is |= strncmp(name, known[i], strlen(known[i])) == 0;
        if (!is || strcmp(json_string_value(text), "7") == 0) fail_msg("%s", name);
    }
    for (size_t i = 0; i < ARRAY_LEN(passed); i++)
        assert_string_equal(json_get_string(v, passed[i]), getenv(passed[i]));
    assert_string_equal(json_get_string(v, "SHOAL_CONFIG"), "");
    assert_string_equal(json_get_string(v, "SHOAL_JOB"), "{}");
    assert_non_null(strstr(json_get_string(v, "TMPDIR"), id.text));
    assert_false(path_exists(json_get_string(v, "TMPDIR"))); /* it was removed when the job ended */
    json_decref(v);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) unsetenv(names[i]);
}

static void test_process_attributes(void **state) {
    (void)state;
    jobs_close(j);
    struct jobs_options o = {
        .rules.kinds = kinds, .max_file = 1 << 20, .max_data = (int64_t)1 << 46};
    j = jobs_open(store, folder, &o, &err);
    int leak = open("/dev/null", O_RDONLY); /* without close-on-exec */
    struct id id = submit("look", NULL);
    await_state(id, "done");
    close(leak);
    json_t *v = first_result(id);
    assert_true(json_is_true(json_object_get(v, "idle")));
    assert_int_equal(json_get_number(v, "nice"), 19);
    assert_true(json_is_true(json_object_get(v, "leader")));
    assert_true(json_is_true(json_object_get(v, "null")));
    assert_true(json_is_false(json_object_get(v, "term")));
    assert_int_equal(json_get_number(v, "fds"), 4);
    assert_int_equal(json_get_number(v, "core"), 0);
    assert_int_equal(json_get_number(v, "file"), 1 << 20);
    assert_int_equal(json_get_number(v, "data"), (int64_t)1 << 46);
    assert_int_equal(json_get_number(v, "umask"), 077);
    json_decref(v);
}

/* recovery */

/* A server process that opens the jobs, starts three and waits to be killed; it writes the jobs and
 * the pid of the first one's child to fd. */
static void run_server(int fd) {
    struct {
        struct id id[3];
        int pid;
    } report;
    log_quiet = true;
    j = jobs_open_with((struct jobs_options){0});
    report.id[0] = submit("once", path_in_dir("once"));
    report.id[1] = submit("lines", "1");
    report.id[2] = submit("lines", "1");
    if (jobs_pause(j, report.id[2].text, &err) != OK) _exit(2);
    await_result(report.id[0]);
    report.pid = job_number(report.id[0], "pid");
    if (write(fd, &report, sizeof report) != sizeof report) _exit(1);
    for (;;) pause();
}

static void test_killed(void **state) {
    (void)state;
    struct {
        struct id id[3];
        int pid;
    } report;
    int pipe_ends[2];
    jobs_close(j);
    j = NULL;
    assert_int_equal(pipe(pipe_ends), 0);
    pid_t pid = fork();
    if (pid == 0) run_server(pipe_ends[1]);
    close(pipe_ends[1]);
    assert_int_equal(read(pipe_ends[0], &report, sizeof report), sizeof report);
    close(pipe_ends[0]);
    assert_true(cpu_ticks(report.pid) >= 0);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    await_death(report.pid);
    j = jobs_open_with((struct jobs_options){0});
    await_state(report.id[1], "done");
    assert_true(is_in_state(report.id[0], "done")); /* it was first */
    assert_true(is_in_state(report.id[2], "paused"));
    assert_int_equal(job_number(report.id[0], "attempts"), 2);
    json_t *v = first_result(report.id[0]), *list = events_after(report.id[0], 5);
    assert_true(json_is_true(json_object_get(v, "again")));
    /* A client that has seen some events misses none of the later ones. */
    assert_string_equal(json_get_string(json_array_get(list, 0), "state"), "queued");
    json_decref(list);
    json_decref(v);
    assert_int_equal(jobs_resume(j, report.id[2].text, &err), OK);
    await_state(report.id[2], "done");
}

/* After an orderly close the result is the same, except that the server ends the child. */
static void test_close(void **state) {
    (void)state;
    struct id id = submit("once", path_in_dir("once")), stopped = submit("spin", NULL);
    await_result(id);
    pid_t pid = job_number(id, "pid");
    struct jobs_options o = {.rules.kinds = kinds};
    assert_null(jobs_open(store, folder, &o, &err)); /* one at a time */
    assert_int_equal(err.code, ERR_STATE);
    assert_int_equal(jobs_pause(j, id.text, &err), OK);
    await_result(stopped);
    assert_int_equal(jobs_pause(j, stopped.text, &err), OK);
    assert_int_equal(jobs_cancel(j, stopped.text, &err), OK);
    reopen((struct jobs_options){0});
    await_death(pid);
    assert_true(is_in_state(id, "paused"));
    assert_true(is_in_state(stopped, "cancelled"));
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "done");
    json_t *before = events_after(id, 0);
    reopen((struct jobs_options){0}); /* a finished job has no new events */
    json_t *last = json_array_get(before, json_array_size(before) - 1),
           *list = events_after(id, json_integer_value(json_object_get(last, "seq")));
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    json_decref(before);
    assert_string_equal(event_states(id), "done");
}

/* evolve does not start a run twice: a run that has written its manifest is resumed by its id; a
 * job that was killed before that gets another id. */
static void test_evolve(void **state) {
    (void)state;
    struct id id;
    char text[400], run[64], runs[200];
    snprintf(runs, sizeof runs, "--runs=%s", path_in_dir("runs"));
    snprintf(text, sizeof text,
             "{\"kind\":\"evolve\",\"args\":[\"r.yaml\"],\"options\":{\"seed\":3,"
             "\"threads\":1}}");
    struct jobs_options o = {.runs = runs + strlen("--runs=")};
    reopen(o);
    assert_int_equal(submit_text(text, NULL, id.text), OK);
    await_state(id, "failed");
    assert_non_null(strstr(job_text(id, "note"), "signal 9"));
    reopen(o); /* the arguments for resuming are in the store too */
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "failed");
    reopen(o);
    assert_int_equal(jobs_resume(j, id.text, &err), OK);
    await_state(id, "done");
    snprintf(run, sizeof run, "%s-2", id.text);
    const char *const wanted[] = {"shoal",  "resume",  runs, "--threads=1",
                                  "--json", "--quiet", "--", run};
    json_t *v = first_result(id);
    assert_int_equal(json_array_size(v), ARRAY_LEN(wanted));
    for (size_t i = 0; i < ARRAY_LEN(wanted); i++)
        assert_string_equal(json_string_value(json_array_get(v, i)), wanted[i]);
    json_decref(v);
}

/* The store fails: no event is reported that is not stored, and all are reported when the store
 * works again. */
static void store_exec(const char *sql) {
    sqlite3 *db = NULL;
    int rc = sqlite3_open(store, &db);
    sqlite3_busy_timeout(db, 10000);
    if (rc == SQLITE_OK) rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
    if (rc != SQLITE_OK)
        fail_msg("%s: %d, %s", sql, sqlite3_extended_errcode(db), sqlite3_errmsg(db));
    sqlite3_close(db);
}

static void test_store_errors(void **state) {
    (void)state;
    struct id id = submit("wait", path_in_dir("go")), none;
    await_result(id);
    store_exec("ALTER TABLE documents RENAME TO away");
    assert_int_equal(submit_text("{\"kind\":\"eval\"}", NULL, none.text), ERR_IO);
    assert_int_equal(jobs_pause(j, id.text, &err), ERR_IO);
    assert_int_equal(jobs_cancel(j, id.text, &err), ERR_IO);
    pid_t pid = job_number(id, "pid");
    touch("go");
    await_death(pid);
    usleep(100000);
    assert_true(is_in_state(id, "running"));
    assert_string_equal(event_states(id), "queued running");
    store_exec("ALTER TABLE away RENAME TO documents");
    await_state(id, "done");
    assert_string_equal(event_states(id), "queued running done");
}

/* jobs in threads of this process */

static atomic_int n_rounds, n_threads; /* rounds of "wait"; threads that run now */

static const char *thread_argument(const struct job_run *r, int i) {
    return json_string_value(json_array_get(json_object_get(r->request, "args"), (size_t)i));
}

static int thread_wait(const struct job_run *r, struct error *e) {
    struct progress p;
    progress_start(&p, "waiting", 10);
    for (int i = 0; !path_exists(thread_argument(r, 1)); i++) {
        if (log_check_cancelled(e) != OK) return e->code;
        yield_task_wait(r->task);
        atomic_fetch_add(&n_rounds, 1);
        progress_update(&p, MIN(i, 9), NULL);
        usleep(1000);
    }
    process_metrics_report((const struct process_metric[]){{"train_loss", 0.5}}, 1);
    return OK;
}

static int thread_run(void *ctx, const struct job_run *r, struct error *e) {
    const char *act = thread_argument(r, 0);
    (void)ctx;
    if (atomic_fetch_add(&n_threads, 1) > 0) abort();
    int rc = OK;
    job_run_print(r, json_pack("{s:s,s:s}", "id", r->id, "last", r->args->v[r->args->n - 1]));
    if (strcmp(act, "wait") == 0) rc = thread_wait(r, e);
    for (int i = 0; strcmp(act, "flood") == 0 && i < 40000; i++)
        job_run_print(r, json_pack("{s:i,s:s}", "i", i, "text", "some text of a result"));
    log_info("a note, which is not printed");
    if (strcmp(act, "fail") == 0) {
        log_warn("a first line");
        rc = error_set(e, ERR_FORMAT, "cannot read 'x\x01y'");
    }
    atomic_fetch_sub(&n_threads, 1);
    return rc;
}

static int thread_request_check(void *ctx, const json_t *request, char field[64], struct error *e) {
    (void)ctx;
    snprintf(field, 64, "args");
    return json_array_size(json_object_get(request, "args")) == 2
               ? OK
               : error_set(e, ERR_USAGE, "two arguments");
}

static struct id submit_thread(const char *act, const char *arg) {
    struct id id;
    json_t *request = json_pack("{s:s,s:[s,s],s:b,s:i}", "kind", "train", "args", act, arg,
                                "in_process", 1, "publish_steps", 3);
    struct job_caller caller = {0};
    if (jobs_submit(j, request, &caller, id.text, &err) != OK) fail_msg("%s", err.text);
    json_decref(request);
    return id;
}

/* These jobs yield, so they do not have the priority of this process. */
static void reopen_with_threads(struct yield *y) {
    const struct jobs_options o = {.max_running = 3,
                                   .run = thread_run,
                                   .yield = y,
                                   .changed = on_changed,
                                   .rules = {.kinds = kinds,
                                             .in_process_kind = "train",
                                             .check_in_process = thread_request_check}};
    jobs_close(j);
    j = jobs_open(store, folder, &o, &err);
    if (!j) fail_msg("%s", err.text);
}

static void test_thread(void **state) {
    (void)state;
    struct yield *y = yield_new(0, clock_now);
    reopen_with_threads(y);
    struct id id = submit_thread("wait", path_in_dir("go"));
    await_result(id);
    assert_int_equal(job_number(id, "pid"), -1);
    json_t *v = first_result(id);
    assert_string_equal(json_get_string(v, "id"), id.text);
    assert_string_equal(json_get_string(v, "last"), path_in_dir("go"));
    json_decref(v);
    touch("go");
    await_state(id, "done");
    assert_string_equal(event_states(id), "queued running done");
    assert_int_equal(job_number(id, "exit"), 0);
    v = job_get(id);
    assert_string_equal(json_get_string(json_object_get(v, "progress"), "title"), "waiting");
    assert_true(json_get_number(json_object_get(v, "figures"), "train_loss") == 0.5);
    assert_true(json_is_true(json_object_get(v, "in_process")));
    assert_int_equal(json_integer_value(json_object_get(v, "publish_steps")), 3);
    json_decref(v);
    id = submit_thread("fail", "");
    await_state(id, "failed");
    assert_int_equal(job_number(id, "exit"), 1);
    assert_string_equal(job_text(id, "note"), "cannot read 'x\xef\xbf\xbdy'");
    struct buf text = {0};
    char *log = jobs_file(j, id.text, "stderr.txt", &err);
    assert_int_equal(file_read(log, 1 << 20, &text, &err), OK);
    assert_string_equal(text.data, "warning: a first line\ncannot read 'x\x01y'\n");
    buf_release(&text);
    free(log);
    jobs_close(j); // before y is freed
    j = jobs_open_with((struct jobs_options){0});
    yield_free(y);
}

/* More results than the pipe holds, also while the job is reaped. */
static void test_thread_flood(void **state) {
    (void)state;
    struct yield *y = yield_new(0, clock_now);
    reopen_with_threads(y);
    struct id id = submit_thread("flood", "");
    await_state(id, "done");
    char *path = jobs_file(j, id.text, "stdout.jsonl", &err);
    struct buf text = {0};
    int lines = 0;
    assert_int_equal(file_read(path, 64 << 20, &text, &err), OK);
    for (size_t i = 0; i < text.len; i++) lines += text.data[i] == '\n';
    assert_int_equal(lines, 40001);
    buf_release(&text);
    free(path);
    submit_thread("flood", "");
    jobs_close(j);
    j = jobs_open_with((struct jobs_options){0});
    yield_free(y);
}

/* Held by a pause, and by foreground work; cancelled in each of these states. */
static void test_thread_control(void **state) {
    (void)state;
    struct yield *y = yield_new(0, clock_now);
    reopen_with_threads(y);
    for (int how = 0; how < 3; how++) {
        struct id id = submit_thread("wait", path_in_dir("never"));
        await_result(id);
        if (how == 1) assert_int_equal(jobs_pause(j, id.text, &err), OK);
        if (how == 2) yield_foreground(y, true);
        int before = atomic_load(&n_rounds);
        if (how) usleep(50000); // it is waiting now, or soon
        assert_true(!how || atomic_load(&n_rounds) <= before + 2);
        if (how == 1) {
            struct id waits = submit_thread("wait", path_in_dir("never"));
            assert_true(is_in_state(waits, "queued")); // the paused job keeps its thread
            assert_int_equal(jobs_cancel(j, waits.text, &err), OK);
            assert_int_equal(jobs_resume(j, id.text, &err), OK);
            UNTIL(atomic_load(&n_rounds) > before + 3);
            assert_true(atomic_load(&n_rounds) > before + 3);
            assert_int_equal(jobs_pause(j, id.text, &err), OK);
        }
        assert_int_equal(jobs_cancel(j, id.text, &err), OK);
        await_state(id, "cancelled");
        if (how == 2) yield_foreground(y, false);
    }
    /* A second job waits for the thread of the first one, another kind of job does not. */
    struct id first = submit_thread("wait", path_in_dir("go")),
              second = submit_thread("wait", path_in_dir("go"));
    await_result(first);
    struct id other = submit("lines", "1");
    UNTIL(!is_in_state(other, "queued"));
    assert_false(is_in_state(other, "queued"));
    assert_true(is_in_state(second, "queued"));
    touch("go");
    await_state(first, "done");
    await_state(second, "done");
    /* Closing ends a job, which the next opening runs again. */
    first = submit_thread("wait", path_in_dir("later"));
    await_result(first);
    reopen_with_threads(y);
    touch("later");
    await_state(first, "done");
    assert_int_equal(job_number(first, "attempts"), 2);
    jobs_close(j);
    j = jobs_open_with((struct jobs_options){0});
    yield_free(y);
}

static void test_thread_requests(void **state) {
    (void)state;
    static const struct {
        const char *text, *field;
        bool good;
    } cases[] = {
        {"{\"kind\":\"train\",\"args\":[\"a\",\"b\"],\"in_process\":true}", "", true},
        {"{\"kind\":\"train\",\"args\":[\"a\"],\"in_process\":true}", "args", false},
        {"{\"kind\":\"train\",\"args\":[\"a\"],\"in_process\":false}", "", true},
        {"{\"kind\":\"eval\",\"in_process\":true}", "in_process", false},
        {"{\"kind\":\"train\",\"in_process\":1}", "in_process", false},
        {"{\"kind\":\"eval\",\"retries\":4}", "retries", false},
        {"{\"kind\":\"eval\",\"priority\":1.5}", "priority", false},
        {"{\"kind\":\"eval\",\"deadline\":0}", "deadline", false},
        {"{\"kind\":\"eval\",\"priority\":-100,\"retries\":0,\"deadline\":9}", "", true},
        {"{\"kind\":\"train\",\"publish_steps\":1}", "publish_steps", false},
        {"{\"kind\":\"train\",\"in_process\":true,\"publish_steps\":0}", "publish_steps", false},
        {"{\"kind\":\"train\",\"in_process\":true,\"publish_steps\":1.5}", "publish_steps", false},
        {"{\"kind\":\"train\",\"in_process\":true,\"publish_steps\":2000000000}", "publish_steps",
         false},
    };
    struct job_request_rules rules = {
        .kinds = kinds, .in_process_kind = "train", .check_in_process = thread_request_check};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct job_request r;
        char field[64];
        json_t *v = json_loads(cases[i].text, 0, NULL);
        int rc = job_request_check(&rules, v, &r, field, &err);
        if (rc != (cases[i].good ? OK : ERR_USAGE)) fail_msg("%s: %s", cases[i].text, err.text);
        if (rc != OK && strcmp(field, cases[i].field) != 0)
            fail_msg("%s: %s", cases[i].text, field);
        if (rc == OK) {
            bool named = json_is_true(json_object_get(v, "in_process"));
            assert_int_equal(json_object_get(r.normalized, "in_process") != NULL, named);
            job_request_release(&r);
        }
        json_decref(v);
    }
    json_t *v = json_loads(cases[0].text, 0, NULL);
    struct job_request r;
    rules.in_process_kind = NULL;
    assert_int_equal(job_request_check(&rules, v, &r, NULL, &err), ERR_USAGE);
    json_decref(v);
}

/* The real program: worlds without a model. */
static void test_program(void **state) {
    (void)state;
    char exe[4096], *slash;
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 16);
    assert_true(n > 0);
    exe[n] = 0;
    slash = strrchr(exe, '/');
    strcpy(slash, "/shoal");
    if (!path_exists(exe)) {
        fprintf(stderr, "SKIP: no '%s'\n", exe);
        skip();
    }
    reopen((struct jobs_options){.program = exe});
    struct id id, bad;
    assert_int_equal(
        submit_text("{\"kind\":\"world\",\"options\":{\"policy\":[\"rule\",\"random\"],"
                    "\"maps\":2,\"steps\":50}}",
                    NULL, id.text),
        OK);
    assert_int_equal(submit_text("{\"kind\":\"world\",\"options\":{\"stepz\":50}}", NULL, bad.text),
                     ERR_USAGE);
    assert_string_equal(err.text, "'world' has no option 'stepz'; did you mean 'steps'?");
    assert_int_equal(submit_text("{\"kind\":\"world\",\"options\":{\"steps\":-1}}", NULL, bad.text),
                     OK);
    await_state(id, "done");
    json_t *list = events_after(id, 0);
    for (int i = 0; i < 2; i++)
        assert_string_equal(
            json_get_string(json_object_get(event_of_type(list, "result", i), "result"), "policy"),
            i ? "random" : "rule");
    assert_string_equal(
        json_get_string(json_object_get(event_of_type(list, "progress", 0), "progress"), "title"),
        "worlds");
    json_decref(list);
    await_state(bad, "failed");
    assert_string_equal(job_text(bad, "note"),
                        "shoal world: '--steps' cannot be -1: it must be 0 to 1000000");
    assert_int_equal(job_number(bad, "exit"), 2);
}

int main(int argc, char **argv) {
    if (argc > 1) return command_main(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_done, setup, teardown),
        cmocka_unit_test_setup_teardown(test_progress_while_running, setup, teardown),
        cmocka_unit_test_setup_teardown(test_metrics, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancel, setup, teardown),
        cmocka_unit_test_setup_teardown(test_remaining_processes_are_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancel_paused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pause, setup, teardown),
        cmocka_unit_test_setup_teardown(test_queue, setup, teardown),
        cmocka_unit_test_setup_teardown(test_max_running, setup, teardown),
        cmocka_unit_test_setup_teardown(test_turns, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fair_share, setup, teardown),
        cmocka_unit_test_setup_teardown(test_retries, setup, teardown),
        cmocka_unit_test_setup_teardown(test_retry_pause, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deadline, setup, teardown),
        cmocka_unit_test_setup_teardown(test_rerun, setup, teardown),
        cmocka_unit_test_setup_teardown(test_idempotency, setup, teardown),
        cmocka_unit_test_setup_teardown(test_command_line, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_resolved, setup, teardown),
        cmocka_unit_test_setup_teardown(test_paths, setup, teardown),
        cmocka_unit_test(test_option_names),
        cmocka_unit_test_setup_teardown(test_output_owners, setup, teardown),
        cmocka_unit_test_setup_teardown(test_limits_by_owner, setup, teardown),
        cmocka_unit_test_setup_teardown(test_time_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(test_environment, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many_events, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_output, setup, teardown),
        cmocka_unit_test_setup_teardown(test_garbage_progress, setup, teardown),
        cmocka_unit_test_setup_teardown(test_progress_pipe, setup, teardown),
        cmocka_unit_test_setup_teardown(test_process_attributes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_close, setup, teardown),
        cmocka_unit_test_setup_teardown(test_evolve, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_thread, setup, teardown),
        cmocka_unit_test_setup_teardown(test_thread_flood, setup, teardown),
        cmocka_unit_test_setup_teardown(test_thread_control, setup, teardown),
        cmocka_unit_test(test_thread_requests),
        cmocka_unit_test_setup_teardown(test_program, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
