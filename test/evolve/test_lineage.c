/*
 * test_lineage: reports of an evolution run: family tree, page, model cards and diversity.
 *
 * Runs are written by hand, so that shares, survivors and texts are known; names contain the
 * special characters of HTML, YAML, Markdown, Graphviz and terminals. No model is needed.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "cli/cli.h"
#include "evolve/evolve.h"
#include "fixture.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char dir[64];

static int folder_open(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-lineage-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int folder_close(void **state) {
    (void)state;
    return folder_remove(dir);
}

static void assert_close(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%.12g is not %.12g ± %.1g", got, want, tolerance);
}

static void assert_contains(const char *text, const char *what) {
    if (!strstr(text, what)) fail_msg("no '%s' in:\n%.3000s", what, text);
}

static int count_matches(const char *text, const char *what) {
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)); p++) n++;
    return n;
}

/* hand-written runs */

static json_t *interval_json(double v) {
    return json_pack("{s:f,s:f,s:f}", "value", v, "lo", v - 0.05, "hi", v + 0.05);
}

static json_t *number(double v) {
    return isfinite(v) ? json_real(v) : json_null();
}

/* A candidate at the end of its generation; a, b: parents or NULL. */
static json_t *add_candidate(json_t *generation, const char *name, const char *a, const char *b,
                             const char *operator_name, double blend, double step, double fitness) {
    char hash[HASH_LEN];
    json_t *parents = json_array();
    if (a) json_array_append_new(parents, json_string(a));
    if (b) json_array_append_new(parents, json_string(b));
    sha256_bytes(name, strlen(name), hash);
    json_t *c =
        json_pack("{s:s,s:s,s:i,s:b,s:o,s:s?,s:o,s:o,s:o,s:o,s:o,s:o,s:i}", "name", name, "hash",
                  hash, "role", 0, "elite", 0, "parents", parents, "operator", operator_name,
                  "step", number(step), "blend", number(blend), "performance", interval_json(0.5),
                  "cooperation", interval_json(0.01), "novelty", interval_json(0.1), "fitness",
                  interval_json(fitness), "items", 200);
    assert_non_null(c);
    json_array_append_new(json_object_get(generation, "candidates"), c);
    return c;
}

static void add_founder(json_t *generation, const char *name, double fitness) {
    add_candidate(generation, name, NULL, NULL, NULL, NAN, NAN, fitness);
}

static json_t *generation_new(json_t *generations) {
    json_t *g =
        json_pack("{s:i,s:[]}", "generation", (int)json_array_size(generations), "candidates");
    json_array_append_new(generations, g);
    return g;
}

#define HOSTILE "a<b>&\"c\""
#define KANJI "日本語"

/* Founders HOSTILE, KANJI and "lone"; g1c0 is 1:3 of the first two; g2c0 is a mutant of it; "lone"
 * has no children and is removed, HOSTILE stays a generation longer. */
static json_t *small_run(void) {
    json_t *run = json_array(), *g = generation_new(run);
    add_founder(g, HOSTILE, 0.5);
    add_founder(g, KANJI, 0.4);
    add_founder(g, "lone", 0.3);
    g = generation_new(run);
    add_candidate(g, "g1c0", HOSTILE, KANJI, "slerp", 0.75, NAN, 0.6);
    add_founder(g, HOSTILE, 0.5);
    json_object_set_new(json_array_get(json_object_get(g, "candidates"), 1), "elite", json_true());
    add_candidate(g, "g1c1", KANJI, NULL, "noise", NAN, 0.25, 0.45);
    g = generation_new(run);
    add_candidate(g, "g2c0", "g1c0", NULL, "noise", NAN, 0.125, 0.65);
    add_candidate(g, "g1c0", HOSTILE, KANJI, "slerp", 0.75, NAN, 0.6);
    add_candidate(g, "g2c1", "g1c0", HOSTILE, "ties", NAN, NAN, 0.55);
    return run;
}

static struct lineage lineage_of_run(const json_t *run) {
    struct lineage l;
    if (lineage_from_json(&l, run, &err) != OK) fail_msg("%s", err.text);
    return l;
}

/* lineage */

static void test_nodes(void **state) {
    (void)state;
    json_t *run = small_run();
    struct lineage l = lineage_of_run(run);
    assert_int_equal(l.n, 7);
    assert_int_equal(l.generations, 3);
    assert_int_equal(l.best, lineage_find(&l, "g2c0"));
    assert_int_equal(lineage_find(&l, "nobody"), -1);
    const struct lineage_node *g1c0 = &l.v[lineage_find(&l, "g1c0")];
    assert_int_equal(g1c0->generation, 1);
    assert_int_equal(g1c0->last_generation, 2);
    assert_int_equal(g1c0->parent[0], lineage_find(&l, HOSTILE));
    assert_int_equal(g1c0->parent[1], lineage_find(&l, KANJI));
    assert_close(g1c0->parent_share[0], 0.25, 0);
    assert_close(g1c0->parent_share[1], 0.75, 0);
    assert_int_equal(l.v[lineage_find(&l, "lone")].last_generation, 0);
    lineage_release(&l);
    json_decref(run);
}

/* A share is the sum over all paths of the product of their shares; without a blend both parents
 * count equally. */
static void test_shares(void **state) {
    (void)state;
    json_t *run = small_run();
    struct lineage l = lineage_of_run(run);
    double flow[7] = {0};
    bool in[7];
    flow[lineage_find(&l, "g2c1")] = 1; // half g1c0, half HOSTILE
    lineage_propagate(&l, flow);
    assert_close(flow[lineage_find(&l, "g1c0")], 0.5, 0);
    assert_close(flow[lineage_find(&l, HOSTILE)], 0.5 + 0.5 * 0.25, 0);
    assert_close(flow[lineage_find(&l, KANJI)], 0.5 * 0.75, 0);
    assert_close(flow[lineage_find(&l, "lone")], 0, 0);
    lineage_ancestors(&l, l.best, in);
    const char *const inside[] = {"g2c0", "g1c0", HOSTILE, KANJI};
    const char *const outside[] = {"lone", "g1c1", "g2c1"};
    for (int i = 0; i < 4; i++) assert_true(in[lineage_find(&l, inside[i])]);
    for (int i = 0; i < 3; i++) assert_false(in[lineage_find(&l, outside[i])]);
    lineage_release(&l);
    json_decref(run);
}

/* A parent with share 0 is an ancestor nevertheless; shares are clamped to 0..1. */
static void test_extrapolated_blend(void **state) {
    (void)state;
    json_t *run = json_array(), *g = generation_new(run);
    add_founder(g, "a", 0.5);
    add_founder(g, "b", 0.4);
    add_candidate(generation_new(run), "c", "a", "b", "slerp", -0.5, NAN, 0.6);
    struct lineage l = lineage_of_run(run);
    bool in[3];
    assert_close(l.v[2].parent_share[0], 1, 0);
    assert_close(l.v[2].parent_share[1], 0, 0);
    lineage_ancestors(&l, 2, in);
    assert_true(in[1]);
    lineage_release(&l);
    json_decref(run);
}

/* A run that is resumed from generation 1 writes it again: later generations are discarded. */
static void test_generation_again(void **state) {
    (void)state;
    json_t *run = small_run(), *again = json_pack("{s:i,s:[]}", "generation", 1, "candidates");
    struct lineage l = lineage_of_run(run);
    add_candidate(again, "other", "lone", NULL, "noise", NAN, 0.1, 0.9);
    assert_int_equal(lineage_add(&l, again, &err), OK);
    assert_int_equal(l.generations, 2);
    assert_int_equal(l.n, 4);
    assert_int_equal(lineage_find(&l, "g1c0"), -1);
    assert_int_equal(l.best, 3);
    assert_int_equal(l.v[lineage_find(&l, HOSTILE)].last_generation, 0);
    lineage_release(&l);
    json_decref(again);
    json_decref(run);
}

/* files */

static char *write_lines(const json_t *run, const char *tail) {
    char *path = path_join(dir, "evolution.jsonl");
    struct buf b = {0};
    size_t i;
    json_t *g;
    json_array_foreach (run, i, g) {
        char *line = json_canonical(g);
        buf_printf(&b, "%s\n", line);
        free(line);
    }
    buf_puts(&b, tail);
    assert_int_equal(file_write(path, b.data, b.len, &err), OK);
    buf_release(&b);
    return path;
}

static void assert_loads(const json_t *run, const char *tail, size_t generations) {
    char *path = write_lines(run, tail);
    json_t *got = lineage_load(path, &err);
    if (!got) fail_msg("%s", err.text);
    assert_int_equal(json_array_size(got), generations);
    json_decref(got);
    free(path);
}

static void test_file(void **state) {
    (void)state;
    json_t *run = small_run();
    char *again = json_canonical(json_array_get(run, 1)), *line = xasprintf("%s\n", again);
    assert_loads(run, "", 3);
    assert_loads(run, " \n\n", 3);
    assert_loads(run, "{\"generation\": 3, \"candi", 3); /* an unfinished write */
    assert_loads(run, again, 2);                         /* complete except for the newline */
    assert_loads(run, line, 2);
    free(again);
    free(line);
    json_decref(run);
}

/* The tail is line 4 of a file with three valid lines. */
static void assert_tail_refused(const char *tail, const char *why) {
    json_t *run = small_run();
    char *path = write_lines(run, tail);
    assert_null(lineage_load(path, &err));
    assert_contains(err.text, why);
    assert_contains(err.text, path);
    free(path);
    json_decref(run);
}

#define LINE(generation, candidates)                                                               \
    "{\"generation\": " generation ", \"candidates\": [" candidates "]}\n"
#define ONE(name, parents)                                                                         \
    "{\"name\": \"" name "\", \"parents\": [" parents "], \"fitness\": {\"value\": 1}}"

static void test_bad_files(void **state) {
    (void)state;
    assert_tail_refused("{\"generation\": 3,}\n", "line 4, column 18");
    assert_tail_refused("nonsense\n", "line 4, column 8");
    assert_tail_refused("[]\n", "line 4: no generation");
    assert_tail_refused("{}\n", "line 4: no generation");
    assert_tail_refused(LINE("\"3\"", ""), "line 4: no generation");
    assert_tail_refused(LINE("-1", ""), "line 4: no generation");
    assert_tail_refused(LINE("5", ""), "line 4: generation 5 follows, where 3 is expected");
    assert_tail_refused(LINE("99999999999", ""), "line 4: generation 99999999999 follows");
    assert_tail_refused("{\"generation\": 3}\n", "line 4: 'candidates' is not a list");
    assert_tail_refused(LINE("3", ""), "line 4: 'candidates' is not a list");
    assert_tail_refused(LINE("3", "7"), "line 4: a candidate has no 'name'");
    assert_tail_refused(LINE("3", ONE("", "")), "line 4: a candidate has no 'name'");
    assert_tail_refused(LINE("3", "{\"name\": \"x\", \"parents\": []}"),
                        "line 4: 'x' has no 'fitness'");
    assert_tail_refused(LINE("3", ONE("x", "1")), "line 4: the 'parents' of 'x'");
    assert_tail_refused(LINE("3", ONE("x", "\"lone\",\"lone\",\"lone\"")), "line 4: the 'parents'");
    assert_tail_refused(LINE("3", ONE("x", "\"no\"")), "line 4: 'x' descends from 'no'");
    assert_tail_refused(LINE("3", ONE("x", "\"x\"")), "line 4: 'x' descends from 'x'");
    assert_tail_refused(LINE("3", ONE("y", "") "," ONE("x", "\"y\"")),
                        "line 4: 'x' descends from 'y'");
    assert_tail_refused(LINE("3", ONE("x", "") "," ONE("x", "")), "line 4: two candidates");
    assert_tail_refused(LINE("3", ONE("lone", "") "," ONE("lone", "")), "line 4: two candidates");
    struct buf many = {0};
    buf_puts(&many, "{\"generation\": 3, \"candidates\": [0");
    for (int i = 0; i < MAX_CANDIDATES; i++) buf_puts(&many, ",0");
    buf_puts(&many, "]}\n");
    assert_tail_refused(many.data, "line 4: 'candidates' is not a list of 1 to 128");
    buf_release(&many);
    char *none = path_join(dir, "none.jsonl"), *empty = path_join(dir, "empty.jsonl");
    assert_null(lineage_load(none, &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_int_equal(file_write(empty, "", 0, &err), OK);
    assert_null(lineage_load(empty, &err));
    assert_int_equal(err.code, ERR_STATE);
    free(none);
    free(empty);
}

/* text, JSON, Graphviz. A kanji takes two columns. */

static char *print_to_text(const json_t *run, const char *name) {
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);
    if (lineage_print(run, name, f, &err) != OK) fail_msg("%s", err.text);
    fclose(f);
    return text;
}

static void assert_prints(const json_t *run, const char *name, const char *want) {
    char *text = print_to_text(run, name);
    assert_string_equal(text, want);
    free(text);
}

static void test_print(void **state) {
    (void)state;
    json_t *run = small_run();
    assert_prints(
        run, NULL,
        "generation 0\n"
        "├── a<b>&\"c\"    0.5000 (0.4500 – 0.5500)  355e834a  founder\n"
        "├── 日本語      0.4000 (0.3500 – 0.4500)  77710aed  founder\n"
        "└── lone        0.3000 (0.2500 – 0.3500)  86c0173f  founder\n"
        "generation 1\n"
        "├── g1c0        0.6000 (0.5500 – 0.6500)  3a0a2b57  slerp of a<b>&\"c\" 25 % and "
        "日本語 75 %\n"
        "├── a<b>&\"c\"    0.5000 (0.4500 – 0.5500)  355e834a  kept since generation 0\n"
        "└── g1c1        0.4500 (0.4000 – 0.5000)  e37aa610  noise of 日本語, step 0.25\n"
        "generation 2\n"
        "├── g2c0        0.6500 (0.6000 – 0.7000)  ac1e8aec  noise of g1c0, step 0.125\n"
        "├── g1c0        0.6000 (0.5500 – 0.6500)  3a0a2b57  kept since generation 1\n"
        "└── g2c1        0.5500 (0.5000 – 0.6000)  cbdb7118  ties of g1c0 50 % and a<b>&\"c\" "
        "50 %\n"
        "\nancestry of g2c0, the fittest of generation 2: a<b>&\"c\" 25.0 %, 日本語 75.0 %\n");
    json_decref(run);
}

static void test_print_ancestors(void **state) {
    (void)state;
    json_t *run = small_run();
    assert_prints(
        run, "g2c1",
        "g2c1                0.5500 (0.5000 – 0.6000)  cbdb7118  ties of g1c0 50 % and a<b>&\"c\" "
        "50 %\n"
        "├── g1c0            0.6000 (0.5500 – 0.6500)  3a0a2b57  slerp of a<b>&\"c\" 25 % and "
        "日本語 75 %\n"
        "│   ├── a<b>&\"c\"    0.5000 (0.4500 – 0.5500)  355e834a  founder\n"
        "│   └── 日本語      0.4000 (0.3500 – 0.4500)  77710aed  founder\n"
        "└── a<b>&\"c\"        0.5000 (0.4500 – 0.5500)  355e834a  founder\n"
        "\nancestry of g2c1: a<b>&\"c\" 62.5 %, 日本語 37.5 %\n");
    FILE *f = fopen("/dev/null", "w");
    assert_int_equal(lineage_print(run, "nobody", f, &err), ERR_MISSING);
    assert_contains(err.text, "no candidate 'nobody' in 3 generations");
    fclose(f);
    json_decref(run);
}

/* The tree ends at the depth limit, and a node is shown once. */
static void test_print_deep(void **state) {
    (void)state;
    json_t *run = json_array(), *g = generation_new(run);
    char name[32], parent[32] = "root";
    add_founder(g, "root", 0.1);
    for (int i = 1; i < 60; i++) {
        snprintf(name, sizeof name, "m%d", i);
        add_candidate(generation_new(run), name, parent, NULL, "noise", NAN, 0.1, 0.1);
        snprintf(parent, sizeof parent, "%s", name);
    }
    char *text = print_to_text(run, "m59");
    assert_int_equal(count_matches(text, "fitness"), 0);
    assert_int_equal(count_matches(text, "noise of"), 25);
    assert_int_equal(count_matches(text, "and so on"), 1);
    assert_contains(text, "ancestry of m59, the fittest of generation 59: root 100.0 %");
    free(text);
    json_decref(run);
}

/* Escape sequences are not printed to the terminal. */
static void test_print_control_characters(void **state) {
    (void)state;
    json_t *run = json_array(), *g = generation_new(run);
    add_founder(g, "red\x1b[31m\nline", 0.1);
    char *text = print_to_text(run, NULL);
    assert_null(strchr(text, 0x1b));
    assert_contains(text, "red\xef\xbf\xbd[31m line ");
    free(text);
    json_decref(run);
}

static void test_json(void **state) {
    (void)state;
    json_t *run = small_run(), *all = lineage_json(run, NULL, &err),
           *one = lineage_json(run, "g1c0", &err);
    assert_int_equal(json_array_size(json_object_get(all, "nodes")), 7);
    assert_int_equal(json_array_size(json_object_get(all, "edges")), 6);
    assert_string_equal(json_get_string(all, "of"), "g2c0");
    char *text = json_canonical(json_object_get(one, "edges"));
    assert_string_equal(text, "[{\"child\":\"g1c0\",\"parent\":\"a<b>&\\\"c\\\"\",\"share\":0.25},"
                              "{\"child\":\"g1c0\",\"parent\":\"日本語\",\"share\":0.75}]");
    free(text);
    text = json_canonical(json_object_get(one, "founders"));
    assert_string_equal(text, "[{\"founder\":\"a<b>&\\\"c\\\"\",\"share\":0.25},"
                              "{\"founder\":\"日本語\",\"share\":0.75}]");
    free(text);
    const json_t *node = json_array_get(json_object_get(one, "nodes"), 2);
    assert_string_equal(json_get_string(node, "operator"), "slerp");
    assert_close(json_number_or_nan(node, "last"), 2, 0);
    assert_close(json_interval(node, "fitness").value, 0.6, 0);
    assert_null(lineage_json(run, "nobody", &err));
    json_decref(all);
    json_decref(one);
    json_decref(run);
}

static void test_dot(void **state) {
    (void)state;
    struct buf b = {0};
    json_t *run = json_array(), *g = generation_new(run);
    add_founder(g, "a\\N\"b", 0.5);
    add_founder(g, KANJI, 0.5);
    add_candidate(generation_new(run), "c", "a\\N\"b", KANJI, "slerp", 0.25, NAN, 0.6);
    assert_int_equal(lineage_dot(run, NULL, &b, &err), OK);
    assert_string_equal(b.data, "digraph lineage {\n"
                                "  node [shape=box, fontname=\"sans-serif\"];\n"
                                "  n0 [label=\"a\\\\N\\\"b\\nfounder\\n0.5000\"];\n"
                                "  n1 [label=\"日本語\\nfounder\\n0.5000\"];\n"
                                "  n2 [label=\"c\\nslerp\\n0.6000\", penwidth=3];\n"
                                "  n0 -> n2 [penwidth=2.00];\n"
                                "  n1 -> n2 [penwidth=1.00];\n"
                                "  { rank=same; n0; n1; }\n"
                                "  { rank=same; n2; }\n"
                                "}\n");
    buf_release(&b);
    json_decref(run);
}

/* the command */

static json_t *cli_printed;

/* main.c defines it, which is not in the library. */
void cli_print_json(json_t *v) {
    json_decref(cli_printed);
    cli_printed = v;
}

/* Returns the standard output, or NULL; *rc: the command's result. */
static char *lineage_run(const char *words, bool json, int *rc) {
    char *block = xcalloc(1, cmd_lineage.size), *line = xstrdup(words), *argv[8], *save = NULL;
    struct cli_options c = {.json = json};
    struct strings args = {0};
    struct buf out = {0};
    char *path = path_join(dir, "stdout");
    int argc = 0, old = dup(STDOUT_FILENO);
    for (char *w = strtok_r(line, " ", &save); w; w = strtok_r(NULL, " ", &save)) argv[argc++] = w;
    options_default(cmd_lineage.rows, block);
    assert_int_equal(options_parse(cmd_lineage.rows, block, argc, argv, &args, &err), OK);
    fflush(stdout);
    assert_non_null(freopen(path, "w", stdout));
    *rc = cmd_lineage.run(&c, block, &args, &err);
    fflush(stdout);
    dup2(old, STDOUT_FILENO);
    close(old);
    assert_int_equal(file_read(path, 1 << 20, &out, &err), OK);
    options_release(cmd_lineage.rows, block);
    strings_release(&args);
    free(block);
    free(line);
    free(path);
    return out.data;
}
static void test_command(void **state) {
    (void)state;
    json_t *run = small_run();
    char *path = write_lines(run, ""), *place = xasprintf("r --runs %s/runs", dir),
         *named = xasprintf("r g2c1 --runs %s/runs", dir),
         *dot = xasprintf("r --dot --runs %s/runs", dir),
         *nobody = xasprintf("r nobody --runs %s/runs", dir),
         *there = xasprintf("%s/runs/r/evolution.jsonl", dir),
         *folder = xasprintf("%s/runs/r", dir), *want = print_to_text(run, NULL);
    int rc;
    assert_int_equal(dir_make(folder, &err), OK);
    free(lineage_run(place, false, &rc));
    assert_int_equal(rc, ERR_STATE);
    assert_contains(err.text, "has evaluated no generation yet");
    assert_int_equal(rename(path, there), 0);
    char *out = lineage_run(place, false, &rc);
    assert_int_equal(rc, OK);
    assert_string_equal(out, want);
    free(out);
    free(want);
    want = print_to_text(run, "g2c1");
    out = lineage_run(named, false, &rc);
    assert_string_equal(out, want);
    free(out);
    out = lineage_run(dot, false, &rc);
    assert_int_equal(rc, OK);
    assert_contains(out, "digraph lineage {");
    free(out);
    free(lineage_run(named, true, &rc));
    assert_int_equal(rc, OK);
    assert_string_equal(json_get_string(cli_printed, "run"), "r");
    assert_string_equal(json_get_string(cli_printed, "of"), "g2c1");
    free(lineage_run(dot, true, &rc));
    assert_int_equal(rc, ERR_USAGE);
    free(lineage_run(nobody, false, &rc));
    assert_int_equal(rc, ERR_MISSING);
    static const char *const none[] = {"other", "../runs/r", ".", "..", "r/."};
    for (size_t i = 0; i < ARRAY_LEN(none); i++) {
        char *words = xasprintf("%s --runs %s/runs", none[i], dir);
        free(lineage_run(words, false, &rc));
        assert_int_equal(rc, ERR_MISSING);
        assert_contains(err.text, "no run '");
        free(words);
    }
    char *const all[] = {path, place, named, dot, nobody, there, folder, want};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) free(all[i]);
    json_decref(cli_printed);
    cli_printed = NULL;
    json_decref(run);
}

/* the page */

/* A result of these generations, with hostile names in every table. */
static json_t *make_result(json_t *run) {
    json_t *adapters = json_object(), *g, *c;
    size_t t, i;
    json_array_foreach (run, t, g)
        json_array_foreach (json_object_get(g, "candidates"), i, c) {
            char *key = xasprintf("gen_%d/%s", (int)t, json_get_string(c, "name"));
            json_object_set(adapters, key, json_object_get(c, "hash"));
            free(key);
        }
    json_t *result = json_pack(
        "{s:s,s:o,s:[{s:s,s:i,s:f,s:f,s:f,s:i,s:i}],s:[{s:s,s:s,s:f,s:f,s:f,s:f,s:b}],s:O,"
        "s:[{s:s,s:i,s:{s:f,s:f,s:f},s:{s:f,s:f,s:f},s:o,s:f}],s:{s:i,s:i,s:f},s:{s:O}}",
        "run", "<run>", "adapters", adapters, "table", "name", "<td>", "n", 500, "acc", 0.5, "lo",
        0.4, "hi", 0.6, "prefilled", 10, "generated", 20, "comparisons", "a", "<a>", "b", "<b>",
        "diff", 0.1, "lo", 0.0, "hi", 0.2, "p_holm", 0.01, "significant", 1, "generations", run,
        "retention", "family", "<family>", "n", 300, "founder", "acc", 0.75, "lo", 0.7, "hi", 0.8,
        "evolved", "acc", 0.25, "lo", 0.2, "hi", 0.3, "diff", interval_json(-0.5), "p_holm", 0.001,
        "spent", "forward_tokens", 123456, "trained_tokens", 789, "flops", 1.5e15, "manifest",
        "adapters", adapters);
    assert_non_null(result);
    json_object_set_new(
        result, "spent_on_founders",
        json_pack("{s:i,s:i,s:f}", "forward_tokens", 0, "trained_tokens", 5000, "flops", 2e9));
    json_object_set_new(
        result, "spent_on_tests",
        json_pack("{s:i,s:i,s:f}", "forward_tokens", 7000, "trained_tokens", 0, "flops", 3e9));
    return result;
}

static json_t *decorated_run(void) {
    json_t *run = small_run(), *last = json_array_get(run, 2);
    for (size_t t = 0; t < 3; t++)
        json_object_set_new(json_array_get(run, t), "diversity",
                            json_pack("{s:f,s:f,s:n,s:f}", "weights_min", 0.5 - 0.1 * (double)t,
                                      "weights_mean", 1.25, "behaviour_min", "behaviour_mean",
                                      0.25));
    json_object_set_new(
        last, "operators",
        json_pack("[{s:s,s:s,s:i,s:i,s:f,s:f,s:n,s:b},{s:s,s:s,s:i,s:i,s:f,s:f,s:f,s:b}]", "name",
                  "slerp", "kind", "crossover", "used", 7, "improved", 3, "quality", 0.0125, "p",
                  0.75, "step", "dropped", 0, "name", "noise", "kind", "mutation", "used", 9,
                  "improved", 1, "quality", -0.5, "p", 0.25, "step", 0.125, "dropped", 1));
    json_object_set_new(
        last, "archive",
        json_pack("{s:i,s:f,s:f,s:[{s:i,s:i,s:s,s:f},{s:i,s:i,s:s,s:f},{s:i,s:i,s:s,s:f}]}", "bins",
                  4, "coverage", 0.125, "qd_score", 1.25, "cells", "x", 0, "y", 0, "name", HOSTILE,
                  "fitness", 0.5, "x", 3, "y", 3, "name", "g2c0", "fitness", 0.75, "x", 9, "y", 0,
                  "name", "outside", "fitness", 0.1));
    return run;
}

/* The page of a result; takes ownership of the result. */
static char *write_page(json_t *result) {
    char *path = path_join(dir, "report.html");
    struct buf b = {0};
    if (evolve_report_write(result, path, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(file_read(path, 1 << 26, &b, &err), OK);
    free(path);
    json_decref(result);
    return b.data;
}

static char *write_page_of_run(json_t *run) {
    json_t *result = make_result(run);
    json_decref(run);
    return write_page(result);
}

static void test_page_escapes(void **state) {
    (void)state;
    char *page = write_page_of_run(decorated_run());
    static const char *const never[] = {"<run>",   "<family>", "<b>&",   "a<b",
                                        "<script", "http:",    "https:", "src=",
                                        "@import", "url(",     "nan",    "inf\""};
    for (size_t i = 0; i < ARRAY_LEN(never); i++)
        if (strstr(page, never[i])) fail_msg("'%s' in:\n%.300s", never[i], strstr(page, never[i]));
    assert_contains(page, "Shoal run &lt;run&gt;");
    assert_contains(page, "a&lt;b&gt;&amp;&quot;c&quot;");
    assert_contains(page, KANJI);
    static const char *const pairs[] = {"svg", "table", "p", "g", "title", "text", "a", "div"};
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++) {
        char open[16], with[16], close[16];
        snprintf(open, sizeof open, "<%s>", pairs[i]);
        snprintf(with, sizeof with, "<%s ", pairs[i]);
        snprintf(close, sizeof close, "</%s>", pairs[i]);
        assert_int_equal(count_matches(page, open) + count_matches(page, with),
                         count_matches(page, close));
    }
    free(page);
}

/* Every link leads to the card in the folder of the generation in which its candidate was born. */
static void test_page_links(void **state) {
    (void)state;
    char *page = write_page_of_run(decorated_run());
    assert_contains(page, "<a href=\"adapters/gen_1/g1c0/README.md\">g1c0</a>");
    assert_contains(page, "<a href=\"adapters/gen_0/a%3Cb%3E%26%22c%22/README.md\">a&lt;b&gt;");
    assert_contains(page, "<a href=\"adapters/gen_0/%E6%97%A5%E6%9C%AC%E8%AA%9E/README.md\">" KANJI
                          "</a>");
    assert_int_equal(count_matches(page, "href=\""), count_matches(page, "href=\"adapters/gen_"));
    assert_null(strstr(page, "gen_2/g1c0"));
    free(page);
    json_t *run = decorated_run(), *result = make_result(run); /* mixes without a file */
    json_object_clear(json_object_get(result, "adapters"));
    json_decref(run);
    page = write_page(result);
    assert_null(strstr(page, "href="));
    assert_contains(page, "g1c0");
    free(page);
}

static void test_page_tables(void **state) {
    (void)state;
    char *page = write_page_of_run(decorated_run());
    assert_contains(page,
                    "<td>slerp<td class=soft>crossover<td class=n>7<td class=n>3<td class=n>+0.0125"
                    "<td class=n>–<td class=n>75.0 %");
    assert_contains(page,
                    "<td>noise <b style=\"color:var(--b)\">dropped</b><td class=soft>mutation<td "
                    "class=n>9<td class=n>1<td class=n>-0.5000<td class=n>0.125<td class=n>25.0 %");
    /* Only g1c0 outlived its generation; of the two children of "noise" one was evaluated. */
    assert_contains(page, "<td class=n>1 of 1<td class=n>100.0 %");
    assert_contains(page, "<td class=n>0 of 1<td class=n>0.0 %");
    assert_contains(
        page, "<td>&lt;family&gt;<td class=n>300<td class=n>75.0 %<td class=soft>70.0 – 80.0<td "
              "class=n>25.0 %<td class=soft>20.0 – 30.0<td class=n>-50.0<td>-55.0 – -45.0");
    assert_contains(page, ">lost</tr>");
    assert_contains(page,
                    "<td>training of the founders<td class=n>0<td class=n>5000<td class=n>2e+09");
    assert_contains(page, "<td>search<td class=n>123456<td class=n>789<td class=n>1.5e+15");
    assert_contains(page, "<td>held-out tests<td class=n>7000<td class=n>0<td class=n>3e+09");
    assert_contains(page, "<td>all<td class=n>130456<td class=n>5789<td class=n>1.5e+15");
    assert_contains(page, "darker is fitter, from 0.5000 to 0.7500. Filled: 12.5 % of the "
                          "cells; QD score 1.25.");
    assert_null(strstr(page, "outside"));
    free(page);
}

/* The page must contain exactly the chart of these lines. */
static void assert_chart(const char *page, const char *label, const char *x_title, int n,
                         double lines[][4], const int *points, const char *const *names) {
    struct curve *c = xcalloc((size_t)n, sizeof *c);
    struct buf b = {0};
    for (int i = 0; i < n; i++)
        for (int x = 0; x < points[i]; x++) curve_add(&c[i], x, lines[i][x]);
    plot_curves(&b, label, x_title, c, names, n);
    assert_contains(page, b.data);
    buf_release(&b);
    free(c);
}

/* One of three founders survives one generation, and none survives two. One of the two candidates
 * of generation 1 was removed; the other is censored. */
static void test_page_survival(void **state) {
    (void)state;
    char *page = write_page_of_run(decorated_run());
    double survival[2][4] = {{1, 1.0 / 3, 0}, {1, 0.5}};
    static const char *const cohorts[] = {"founders", "born in generation 1"};
    assert_chart(page, "survival", "generations after birth", 2, survival, (int[]){3, 2}, cohorts);
    /* generation 1: g1c0, HOSTILE and g1c1; generation 2: g2c0 and g1c0 as 1:3, g2c1 as 5:3 */
    double lines[3][4] = {{100 / 3.0, 125 / 3.0, 37.5}, {100 / 3.0, 175 / 3.0, 62.5}, {100 / 3.0}};
    static const char *const founders[] = {HOSTILE " 37.5 %", KANJI " 62.5 %", "lone 0.0 %"};
    assert_chart(page, "ancestry by founder", "generation", 3, lines, (int[]){3, 3, 3}, founders);
    double diversity[4][4] = {{1.25, 1.25, 1.25}, {0.5, 0.4, 0.3}, {0.25, 0.25, 0.25}, {0}};
    static const char *const kinds[] = {"weights, mean", "weights, nearest two", "behaviour, mean",
                                        "behaviour, nearest two"};
    assert_chart(page, "diversity by generation", "generation", 4, diversity, (int[]){3, 3, 3, 0},
                 kinds);
    free(page);
}

static json_t *large_run(int generations, int population) {
    json_t *run = json_array();
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int t = 0; t < generations; t++) {
        json_t *g = generation_new(run);
        for (int i = 0; i < population; i++) {
            char name[32], a[32], b[32];
            snprintf(name, sizeof name, "g%dc%d", t, i);
            int first = (int)rng_below(&r, (uint32_t)population / 2);
            snprintf(a, sizeof a, "g%dc%d", t - 1, first);
            snprintf(b, sizeof b, "g%dc%d", t - 1, population / 2);
            add_candidate(g, name, t ? a : NULL, t ? b : NULL, t ? "slerp" : NULL, 0.3, NAN,
                          1 - i / 100.0 + t / 10.0);
        }
    }
    return run;
}

static void test_large_pages(void **state) {
    (void)state;
    char *page = write_page_of_run(large_run(50, 64));
    assert_contains(page, "Only ancestors of the last generation's best are shown");
    assert_contains(page, "The run had 3200 candidates.");
    assert_contains(page, "The last 300 of 3200");
    assert_true(strlen(page) < 2000000);
    assert_true(count_matches(page, "rx=\"6\"") <= 240);
    assert_true(count_matches(page, "rx=\"6\"") >= 90);
    assert_contains(page, "<a href=\"adapters/gen_49/g49c0/README.md\">");
    free(page);
    page = write_page_of_run(large_run(300, 64));
    assert_true(strlen(page) < 2000000);
    assert_null(strstr(page, "Rings are"));
    free(page);
    page = write_page_of_run(small_run());
    assert_null(strstr(page, "Only ancestors"));
    assert_int_equal(count_matches(page, "rx=\"6\""), 7);
    free(page);
}

/* Searches without operators, archive or parents, runs without generations, and records without a
 * tree give a page too. */
static void test_page_without_optional_parts(void **state) {
    (void)state;
    json_t *run = json_array();
    char *page = write_page_of_run(run);
    assert_null(strstr(page, "Family tree"));
    free(page);
    run = json_array();
    add_founder(generation_new(run), "only", 0.5);
    page = write_page_of_run(run);
    assert_contains(page, "Family tree");
    assert_null(strstr(page, "<h2>Survival"));
    assert_null(strstr(page, "<h2>Operators"));
    assert_null(strstr(page, "<h2>Archive"));
    assert_null(strstr(page, "<h2>Diversity"));
    free(page);
    run = small_run();
    json_object_set_new(json_array_get(run, 2), "generation", json_integer(7));
    page = write_page_of_run(run);
    assert_contains(page,
                    "The family tree cannot be shown: generation 7 follows, where 2 is expected");
    assert_contains(page, "<h2>Candidates");
    free(page);
}

static void test_run_print(void **state) {
    (void)state;
    json_t *run = small_run(), *result = make_result(run);
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);
    evolve_run_print(result, f);
    fclose(f);
    assert_contains(text, "<family>: 75.0 → 25.0 %, -50.0 (-55.0 – -45.0), p = 0.001: lost\n");
    free(text);
    json_decref(result);
    json_decref(run);
}

/* cards */

static char *write_card(const char *model, const char *run, const json_t *c) {
    struct buf b = {0};
    char *path = path_join(dir, "README.md");
    if (model_card_write(dir, model, run, 3, c, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(file_read(path, 1 << 20, &b, &err), OK);
    free(path);
    return b.data;
}

/* The YAML between the first two lines of "---". */
static json_t *front_matter(const char *card) {
    struct yaml y;
    assert_memory_equal(card, "---\n", 4);
    const char *end = strstr(card + 4, "\n---\n");
    assert_non_null(end);
    if (yaml_parse(&y, "README.md", card + 4, (size_t)(end - card - 3), &err) != OK)
        fail_msg("%s", err.text);
    json_t *v = json_incref(y.root);
    yaml_release(&y);
    return v;
}

static void test_card(void **state) {
    (void)state;
    json_t *g = json_pack("{s:[]}", "candidates");
    json_t *c = add_candidate(g, "g3c1", "g2c0", KANJI, "slerp", 0.375, 0.25, 0.61);
    char *card = write_card("fry", "20260801-s1", c), hash[HASH_LEN];
    json_t *front = front_matter(card), *tags = json_pack("[s,s,s]", "lora", "shoal", "evolution");
    assert_string_equal(json_get_string(front, "base_model"), "fry");
    assert_string_equal(json_get_string(front, "library_name"), "peft");
    assert_true(json_equal(json_object_get(front, "tags"), tags));
    assert_int_equal(json_object_size(front), 3);
    assert_contains(card, "\n# g3c1\n");
    assert_contains(
        card, "| run | 20260801-s1 |\n| generation | 3 |\n| made by | slerp |\n| parent | g2c0 |\n"
              "| second parent | " KANJI " |\n| share of the second parent | 0.375 |\n"
              "| step | 0.25 |\n");
    sha256_bytes("g3c1", 4, hash);
    assert_contains(card, hash);
    assert_contains(
        card, "| fitness | 0.6100 | 0.5600 – 0.6600 |\n| performance | 0.5000 | 0.4500 – 0.5500 |\n"
              "| cooperation | 0.0100 | -0.0400 – 0.0600 |\n");
    assert_contains(card, "Measured on 200 questions");
    assert_contains(card, "    shoal run 'fry' --adapter DIR ");
    json_decref(tags);
    json_decref(front);
    json_decref(g);
    free(card);
}

/* Names that would end the front matter, begin a heading, a table cell or HTML, or a second
 * command. */
static void test_card_quotes(void **state) {
    (void)state;
    static const char *const models[] = {"a: \"b\"\n---\n# c",  "- x # y",   "'; rm -rf /; '", "{}",
                                         "!tag &anchor *alias", "日本語\\n", "\x7f\xc2\x85",   ""};
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        json_t *g = json_pack("{s:[]}", "candidates");
        json_t *c = add_candidate(g, "<i>|`x`\n# y", NULL, NULL, NULL, NAN, NAN, 0.5);
        char *card = write_card(models[i], models[i], c);
        json_t *front = front_matter(card);
        struct buf line = {0};
        buf_add_one_line(&line, models[i]);
        assert_int_equal(json_object_size(front), 3);
        assert_string_equal(json_get_string(front, "base_model"), line.data ? line.data : "");
        assert_contains(card, "\n# \\<i\\>\\|\\`x\\` \\# y\n");
        assert_int_equal(count_matches(card, "\n# "), 1);
        assert_int_equal(count_matches(card, "\n---\n"), 1);
        assert_contains(card, "| made by | training |\n");
        buf_release(&line);
        json_decref(front);
        json_decref(g);
        free(card);
    }
    json_t *g = json_pack("{s:[]}", "candidates");
    json_t *c = add_candidate(g, "x", NULL, NULL, NULL, NAN, NAN, 0.5);
    char *card = write_card("it's", "r", c);
    assert_contains(card, "    shoal run 'it'\\''s' --adapter DIR ");
    free(card);
    assert_int_equal(model_card_write("/nowhere/at/all", "m", "r", 0, c, &err), ERR_MISSING);
    json_decref(g);
}

/* diversity */

enum { N = 5 };

/* a plus noise with `noise` times its norm. */
static struct adapter *add_noise(struct adapter *a, double noise, uint64_t seed) {
    struct adapter *n = fixture_adapter(&a->shape, 4, "q_proj,v_proj", 0.1f, seed);
    float weights[2] = {1, (float)(noise * sqrt(adapter_dot(a, a) / adapter_dot(n, n)))};
    struct adapter *sum = adapter_concat((struct adapter *[]){a, n}, weights, 2, &err);
    if (!sum) fail_msg("%s", err.text);
    adapter_release(n);
    return sum;
}

static void test_diversity(void **state) {
    (void)state;
    struct model_config c;
    struct adapter *a[N];
    double distance[N * N], want[4] = {INFINITY, 0, 0, 0}, apart[2] = {INFINITY, 0}, pairs = 10;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    for (int i = 0; i < N; i++)
        a[i] = fixture_adapter(&c, 2 + i, "q_proj,v_proj", 0.1f + 0.05f * (float)i, (uint64_t)i);
    for (int i = 0; i < N; i++) {
        want[3] += sqrt(adapter_dot(a[i], a[i])) / N;
        for (int j = 0; j < N; j++) {
            distance[i * N + j] = i == j ? 0 : 0.01 * (i + 1) * (j + 1);
            if (j <= i) continue;
            want[0] = fmin(want[0], adapter_distance(a[i], a[j]));
            want[1] += adapter_distance(a[i], a[j]) / pairs;
            want[2] += adapter_cosine(a[i], a[j]) / pairs;
            apart[0] = fmin(apart[0], distance[i * N + j]);
            apart[1] += distance[i * N + j] / pairs;
        }
    }
    struct diversity d = diversity_compute(a, N, distance), blind = diversity_compute(a, N, NULL),
                     alone = diversity_compute(a, 1, distance);
    assert_close(d.weights_min, want[0], 1e-12);
    assert_close(d.weights_mean, want[1], 1e-12);
    assert_close(d.cosine_mean, want[2], 1e-12);
    assert_close(d.norm_mean, want[3], 1e-12);
    assert_close(d.behaviour_min, apart[0], 1e-15);
    assert_close(d.behaviour_mean, apart[1], 1e-15);
    assert_close(adapter_distance(a[d.duplicate_of[0]], a[d.duplicate_of[1]]), d.weights_min,
                 1e-12);
    assert_true(isnan(blind.behaviour_min) && isnan(blind.behaviour_mean));
    assert_close(blind.weights_mean, d.weights_mean, 0);
    assert_true(isnan(alone.weights_min) && isnan(alone.cosine_mean));
    assert_int_equal(diversity_check(&alone, (const char *[]){"a"}, &err), OK);
    json_t *v = diversity_json(&blind);
    assert_close(json_number_or_nan(v, "weights_mean"), d.weights_mean, 0);
    assert_true(json_is_null(json_object_get(v, "behaviour_min")));
    assert_int_equal(json_object_size(v), 6);
    json_decref(v);
    for (int i = 0; i < N; i++) adapter_release(a[i]);
}

/* Distances that follow from the construction of the adapters. */
static void test_known_distances(void **state) {
    (void)state;
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct adapter *a = fixture_adapter(&c, 4, "q_proj,v_proj", 0.1f, 1), *b = adapter_scale(a, 2),
                   *minus = adapter_scale(a, -1), *zero = adapter_scale(a, 0);
    struct diversity d = diversity_compute((struct adapter *[]){a, b}, 2, NULL);
    assert_close(d.weights_min, 1 / 1.5, 1e-6);
    assert_close(d.cosine_mean, 1, 1e-6);
    d = diversity_compute((struct adapter *[]){a, minus}, 2, NULL);
    assert_close(d.weights_min, 2, 1e-6);
    assert_close(d.cosine_mean, -1, 1e-6);
    d = diversity_compute((struct adapter *[]){a, zero}, 2, NULL);
    assert_close(d.weights_min, 2, 1e-6);
    assert_close(d.cosine_mean, 0, 0);
    d = diversity_compute((struct adapter *[]){a, b, a}, 3, NULL);
    assert_close(d.weights_min, 0, 0);
    assert_int_equal(d.duplicate_of[0], 0);
    assert_int_equal(d.duplicate_of[1], 2);
    d = diversity_compute((struct adapter *[]){zero, zero}, 2, NULL);
    assert_close(d.weights_min, 0, 0);
    adapter_release(a);
    adapter_release(b);
    adapter_release(minus);
    adapter_release(zero);
}

/* Copies with 2 % noise are refused with the distance and the names; 8 % and independent adapters
 * are accepted. */
static void test_copies_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {"ann", "bea", KANJI};
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct adapter *a = fixture_adapter(&c, 4, "q_proj,v_proj", 0.1f, 1),
                   *b = fixture_adapter(&c, 4, "q_proj,v_proj", 0.1f, 2),
                   *copy = add_noise(a, 0.02, 3), *far = add_noise(a, 0.08, 4);
    struct diversity d = diversity_compute((struct adapter *[]){a, b, copy}, 3, NULL);
    assert_close(d.weights_min, 0.02, 0.001);
    assert_int_equal(diversity_check(&d, names, &err), ERR_MISMATCH);
    assert_contains(err.text, "founders 'ann' and '" KANJI
                              "' are copies except for noise: they differ by 2 %");
    assert_contains(err.text, "should by 5 % or more");
    d = diversity_compute((struct adapter *[]){a, b, far}, 3, NULL);
    assert_close(d.weights_min, 0.08, 0.004);
    assert_int_equal(diversity_check(&d, names, &err), OK);
    d = diversity_compute((struct adapter *[]){a, b}, 2, NULL);
    assert_close(d.weights_min, sqrt(2), 0.1);
    assert_int_equal(diversity_check(&d, names, &err), OK);
    adapter_release(a);
    adapter_release(b);
    adapter_release(copy);
    adapter_release(far);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nodes),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_extrapolated_blend),
        cmocka_unit_test(test_generation_again),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_print),
        cmocka_unit_test(test_print_ancestors),
        cmocka_unit_test(test_print_deep),
        cmocka_unit_test(test_print_control_characters),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_dot),
        cmocka_unit_test(test_command),
        cmocka_unit_test(test_page_escapes),
        cmocka_unit_test(test_page_links),
        cmocka_unit_test(test_page_tables),
        cmocka_unit_test(test_page_survival),
        cmocka_unit_test(test_large_pages),
        cmocka_unit_test(test_page_without_optional_parts),
        cmocka_unit_test(test_run_print),
        cmocka_unit_test(test_card),
        cmocka_unit_test(test_card_quotes),
        cmocka_unit_test(test_diversity),
        cmocka_unit_test(test_known_distances),
        cmocka_unit_test(test_copies_are_refused),
    };
    return cmocka_run_group_tests(tests, folder_open, folder_close);
}
