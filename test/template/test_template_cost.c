/*
 * Cost of templates: a hostile template fails with an error that names the limit it reached, long
 * conversations stay below the limits, and the time per byte of parsing and rendering is constant.
 *
 * SHOAL_COST=1 prints, for each hostile template, its steps, memory and time.
 */
/* levels: once */
#include "api/go_template.h"
#include "api/ollama.h"
#include "fixture.h"
#include "model/model.h"
#include "template/template.h"

#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <time.h>

#include <cmocka.h>

/* Sanitizers use smaller inputs; steps are counted but not timed. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined __SANITIZE_ADDRESS__ || __has_feature(address_sanitizer)
enum { TIMED = 0 };
#else
enum { TIMED = 1 };
#endif

/* Processor time of this process only. */
static double cpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct template_cost {
    int rc;
    struct error err;
    uint64_t steps;
    size_t bytes, n;
    double seconds;
};

/* max_steps 0: the default. */
static struct template_cost render(const char *template, const json_t *vars, uint64_t max_steps) {
    struct template_cost r = {0};
    struct jinja_output out = {0};
    double start = cpu_now();
    struct jinja *j = jinja_parse(template, strlen(template), &r.err);
    struct jinja_input in = {.vars = vars, .now = 0, .max_steps = max_steps};
    r.rc = j ? jinja_render(j, &in, &out, &r.err) : r.err.code;
    r.seconds = cpu_now() - start;
    r.steps = out.steps;
    r.bytes = out.bytes;
    r.n = out.n;
    jinja_output_release(&out);
    jinja_free(j);
    return r;
}

/* hostile templates */

#define LONG_LOOPS "{% for a in range(99999) %}{% for b in range(999) %}"
#define END_LOOPS "{% endfor %}{% endfor %}"
#define IF(x) LONG_LOOPS "{% if " x " %}{% endif %}" END_LOOPS
#define L "{% set l = range(9999)|list %}"
#define S "{% set s = 'a' * 99999 %}"
/* A list of 2^40 elements of which most are the same. */
#define SHARED_LISTS                                                                               \
    "{% set n = namespace(l=[1], m=[1], t=(1,)) %}{% for i in range(40) %}{% set n.l = [n.l, "     \
    "n.l] %}"                                                                                      \
    "{% set n.m = [n.m, n.m] %}{% set n.t = (n.t, n.t) %}{% endfor %}"

static const struct {
    const char *name, *template;
} hostile[] = {
    {"empty loops", LONG_LOOPS END_LOOPS},
    {"in a list", L IF("-1 in l")},
    {"in a list of strings", "{% set l = ['a'] * 9999 %}" IF("'b' in l")},
    {"in a list of other kinds", "{% set l = ['a'] * 9999 %}" IF("1 in l")},
    {"in a long string", S IF("'ab' in s")},
    {"in a string, half found", S "{% set t = 'a' * 5000 ~ 'b' %}" IF("t in s")},
    {"equal lists", "{% set l = range(9999)|list %}{% set m = l + [] %}" IF("l == m")},
    {"equal strings", S "{% set t = s ~ '' %}" IF("s == t")},
    {"equal deep lists", SHARED_LISTS IF("n.l == n.m")},
    {"equal dicts", "{% set d = dict(range(9999)|map('string')|map('list')|select('none')) %}" IF(
                        "{'a': 1, 'b': [1, 2]} == {'b': [1, 2], 'a': 1}")},
    {"order of lists", "{% set l = [1] * 9999 %}{% set m = [1] * 9999 + [2] %}" IF("l < m")},
    {"order of strings", S "{% set t = s ~ 'b' %}" IF("s < t")},
    {"a deep key", SHARED_LISTS IF("n.t in {1: 1}")},
    {"a deep key of a dict of many",
     SHARED_LISTS "{% set d = {1:1,2:1,3:1,4:1,5:1,6:1,7:1,8:1,9:1} %}" IF("n.t in d")},
    {"doubling by +",
     "{% set n = namespace(s='ab') %}" LONG_LOOPS "{% set n.s = n.s + n.s %}" END_LOOPS},
    {"doubling by ~",
     "{% set n = namespace(s='ab') %}" LONG_LOOPS "{% set n.s = n.s ~ n.s %}" END_LOOPS},
    {"doubling of lists",
     "{% set n = namespace(l=[1]) %}" LONG_LOOPS "{% set n.l = n.l + n.l %}" END_LOOPS},
    {"repetition", "{{ 'x' * 999999999999 }}"},
    {"repetition of lists", "{{ ([1] * 999999999999)|length }}"},
    {"short repetitions", IF("'x' * 999")},
    {"replace", "{% set s = 'a' * 9999 %}{{ s|replace('a', s)|replace('a', s) }}"},
    {"replace of nothing", S IF("s|replace('', 'b')")},
    {"replace that finds nothing", S IF("s|replace('b', 'c')")},
    {"join", "{% set l = ['x' * 999] * 9999 %}{{ l|join(l|join) }}"},
    {"joins", "{% set l = ['a'] * 9999 %}" IF("l|join")},
    {"split", S IF("s.split('a')")},
    {"split at blanks", "{% set s = 'a ' * 9999 %}" IF("s.split()")},
    {"rsplit", S IF("s.rsplit('b', 1)")},
    {"splitlines", S IF("s.splitlines()")},
    {"format", IF("'%99.99f' % 1e300")},
    {"format of integers", IF("'%99d' % 1")},
    {"format of many", "{% set f = '{}' * 99 %}" IF("'{a}{a}{a}{a}'.format(a=1,b=2,c=3,d=4,e=5)")},
    {"floats printed", IF("0.1234567890123456|string")},
    {"integers printed", IF("123456789012345678|string")},
    {"floats read", "{% set s = '1' * 300 %}" IF("s|float")},
    {"round", IF("1.23456789e300|round(20)")},
    {"dates", IF("strftime_now('%A %B %c %A %B %c')")},
    {"sort", "{% set l = range(99999)|list %}" IF("l|sort")},
    {"sort with costly comparisons", "{% set l = [['a' * 9999, 1]] * 999 %}" IF("l|sort")},
    {"sort by an attribute", "{% set l = [{'a': {'b': 1}}] * 999 %}" IF("l|sort(attribute='a.b')")},
    {"unique", L IF("l|unique")},
    {"min", L IF("l|min")},
    {"min of long strings", S "{% set l = [s] * 99 %}" IF("l|min")},
    {"sum", L IF("l|sum")},
    {"map", L IF("l|map('string')")},
    {"map of attributes", "{% set l = [{'a': {'b': 1}}] * 999 %}" IF("l|map(attribute='a.b')")},
    {"select", L IF("l|select('odd')")},
    {"upper", S IF("s|upper")},
    {"upper of Chinese", "{% set s = '\u4e2d' * 9999 %}" IF("s|upper")},
    {"title", S IF("s|title")},
    {"isupper", "{% set s = 'A' * 9999 %}" IF("s.isupper()")},
    {"isalpha", S IF("s.isalpha()")},
    {"length of a string", S IF("s|length")},
    {"wordcount", S IF("s|wordcount")},
    {"strip", "{% set s = ' ' * 9999 %}" IF("s.strip()")},
    {"strip of many", S "{% set t = 'b' * 9999 ~ 'a' %}" IF("s.strip(t)")},
    {"slices", S IF("s[1:]")},
    {"slices backwards", S IF("s[::-1]")},
    {"slices of Chinese", "{% set s = '\u4e2d' * 9999 %}" IF("s[5000:]")},
    {"slices of lists", L IF("l[1:]")},
    {"an index of Chinese", "{% set s = '\u4e2d' * 9999 %}" IF("s[9998]")},
    {"count", S IF("s.count('a')")},
    {"find", S IF("s.find('b')")},
    {"rfind", S IF("s.rfind('b')")},
    {"startswith", "{% set s = 'a' * 9999 %}" IF("s.startswith(s)")},
    {"JSON of strings", S IF("s|tojson")},
    {"JSON of strings that are escaped", "{% set s = '\\n' * 9999 %}" IF("s|tojson")},
    {"JSON of Chinese", "{% set s = '\u4e2d' * 9999 %}" IF("s|tojson(ensure_ascii=true)")},
    {"JSON of lists", L IF("l|tojson(indent=9)")},
    {"JSON, sorted",
     "{% set d = {'c': 1, 'b': 1, 'a': 1, 'd': {}} %}" IF("d|tojson(sort_keys=true)")},
    {"JSON of deep lists", SHARED_LISTS "{{ n.l|tojson }}"},
    {"repr of strings", S IF("[s]|string")},
    {"repr of deep lists", SHARED_LISTS "{{ n.l }}"},
    {"escape", S IF("s|escape")},
    {"indent", "{% set s = 'a\\n' * 9999 %}" IF("s|indent(99)")},
    {"macros",
     "{% macro m(x) %}{{ m(x) if x else '' }}{{ m(x) if x else '' }}{% endmacro %}" LONG_LOOPS
     "{{ m(0) }}" END_LOOPS},
    {"macros that call themselves twice",
     "{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"},
    {"names that are not there", IF("nothing")},
    {"attributes", "{% set d = {'a': 1} %}" IF("d.a")},
    {"attributes of strings", IF("'a'.b")},
    {"methods", IF("'a'.strip()")},
    {"loop variables", LONG_LOOPS "{% if loop.previtem %}{% endif %}" END_LOOPS},
    {"loop.changed", L LONG_LOOPS "{% if loop.changed(l) %}{% endif %}" END_LOOPS},
    {"namespaces", "{% set n = namespace() %}" LONG_LOOPS "{% set n.a = b %}" END_LOOPS},
    {"dicts", IF("{'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5, 'f': 6, 'g': 7, 'h': 8, 'i': 9}")},
    {"dicts of tuples", IF("{(1, 2): 1, (1, 'a', (2, 3)): 2}")},
    {"copies of dicts",
     "{% set d = dict([(1,1),(2,1),(3,1),(4,1),(5,1),(6,1),(7,1),(8,1),(9,1)]) %}" IF("d.copy()")},
    {"range", IF("range(99999)")},
    {"a range too long", "{{ range(1000000000)|length }}"},
    {"a width", "{{ 'a'|center(1000000000) }}"},
    {"captured blocks", LONG_LOOPS "{% set x %}{{ x }}{{ x }}aa{% endset %}" END_LOOPS},
    {"generation",
     S LONG_LOOPS "{% set x %}{% generation %}{{ s }}{% endgeneration %}{% endset %}" END_LOOPS},
    {"output", S LONG_LOOPS "{{ s }}" END_LOOPS},
    {"short outputs", LONG_LOOPS "a{{ b }}" END_LOOPS},
    {"arithmetic", IF("1 + b * 2 - 3 // 4 % 5")},
    {"powers", IF("2 ** 62")},
    {"floats", IF("1.5 // 0.7 % 3.1")},
    {"conditions", IF("(not (b and a or b) if b else a)")},
};

static bool error_names_limit(const struct template_cost *r) {
    static const char *const words[] = {"too many steps",    "MiB of memory",
                                        "nested too deeply", "writes more than",
                                        "'range' is longer", "'center' is not supported"};
    for (size_t i = 0; r->rc == ERR_FORMAT && i < ARRAY_LEN(words); i++)
        if (strstr(r->err.text, words[i])) return true;
    return false;
}

/* Each template reaches a limit, and no operation takes much more time per step than others: work
 * without steps would appear as steps that take microseconds. */
static void test_hostile(void **state) {
    (void)state;
    json_t *vars = json_object();
    double max_seconds = 0, all[ARRAY_LEN(hostile)];
    for (size_t i = 0; i < ARRAY_LEN(hostile); i++) {
        struct template_cost r = render(hostile[i].template, vars, TIMED ? 0 : 1000000);
        double ns = r.seconds * 1e9 / (double)MAX(r.steps, (uint64_t)100000);
        if (getenv("SHOAL_COST"))
            fprintf(stderr, "%-40s %9llu steps %4zu MiB %6.3f s %6.1f ns a step %s\n",
                    hostile[i].name, (unsigned long long)r.steps, r.bytes >> 20, r.seconds, ns,
                    r.rc ? r.err.text : "");
        if (!error_names_limit(&r))
            fail_msg("%s: %s", hostile[i].name, r.rc ? r.err.text : "it is rendered");
        max_seconds = MAX(max_seconds, r.seconds);
        all[i] = ns;
    }
    qsort(all, ARRAY_LEN(all), sizeof *all, double_compare);
    double median = all[ARRAY_LEN(all) / 2], costly = all[ARRAY_LEN(all) - 1];
    fprintf(stderr, "%zu hostile templates: at most %.2f s each and %.0f ns a step, median %.0f\n",
            ARRAY_LEN(hostile), max_seconds, costly, median);
    if (TIMED) assert_true(costly < 25 * median);
    json_decref(vars);
}

/* conversations */

static const char *const published[] = {
    "HuggingFaceTB-SmolLM3-3B.jinja",
    "Qwen-Qwen2.5-7B-Instruct.jinja",
    "Qwen-Qwen3-0.6B.jinja",
    "google-gemma-2-2b-it.jinja",
    "meta-llama-Llama-3.2-3B-Instruct.jinja",
};

/* n turns of `size` bytes each, the user's and the assistant's by turns. */
static json_t *conversation(int n, size_t size) {
    json_t *messages = json_array();
    char *text = xmalloc(size + 1);
    for (size_t i = 0; i < size; i++) text[i] = "a long text, 1 < 2.\n"[i % 20];
    text[size] = 0;
    for (int i = 0; i < n; i++)
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user",
                                                  "content", text));
    free(text);
    return messages;
}

static json_t *tools(int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(
            list, json_pack("{s:s,s:{s:s,s:s,s:{s:s,s:{s:{s:s,s:s,s:f}}}}}", "type", "function",
                            "function", "name", "look_up", "description",
                            "Looks something up, \"quoted\" and in 日本語 too.", "parameters",
                            "type", "object", "properties", "place", "type", "string",
                            "description", "Where it is looked up", "default", 0.1234567890123456));
    return list;
}

static json_t *chat_vars(json_t *messages, json_t *list) {
    return json_pack("{s:o,s:o?,s:b,s:s,s:s}", "messages", messages, "tools", list,
                     "add_generation_prompt", 1, "bos_token", "<s>", "eos_token", "</s>");
}

/* Real templates with long conversations stay well below the limits. */
static void test_long_conversations(void **state) {
    (void)state;
    const struct {
        int messages;
        size_t size;
        int tools;
    } cases[] = {{8192, 40, 0}, {16, 400000, 0}, {5, 1000, 4000}, {32768, 10, 0}};
    for (size_t i = 0; i < ARRAY_LEN(published); i++) {
        char *path = xasprintf("data/chat-templates/%s", published[i]);
        char *full = fixture_shared(path);
        struct buf template = {0};
        struct error err;
        free(path);
        if (!full) skip();
        assert_int_equal(file_read(full, 1 << 20, &template, &err), OK);
        for (size_t k = 0; k < ARRAY_LEN(cases) - !TIMED; k++) {
            json_t *vars = chat_vars(conversation(cases[k].messages, cases[k].size),
                                     cases[k].tools ? tools(cases[k].tools) : NULL);
            struct template_cost r = render(template.data, vars, 0);
            if (getenv("SHOAL_COST"))
                fprintf(stderr, "%-40s %d messages %9llu steps %4zu MiB %6.3f s %s\n", published[i],
                        cases[k].messages, (unsigned long long)r.steps, r.bytes >> 20, r.seconds,
                        r.rc ? r.err.text : "");
            if (r.rc != OK) fail_msg("%s: %s", published[i], r.err.text);
            assert_true(r.steps < JINJA_MAX_STEPS / (k < 3 ? 4 : 2));
            json_decref(vars);
        }
        buf_release(&template);
        free(full);
    }
}

/* time per byte */

/* Processes an input of about `size` bytes: its bytes, and its steps or 0. */
struct sized_input {
    double seconds;
    uint64_t steps;
    size_t bytes;
};
typedef struct sized_input (*sized_fn)(const void *ctx, size_t size);

/* Steps per byte stay within a factor of 1.6 of the minimum, seconds per byte within 3 for inputs
 * that take more than 10 ms: below that, other processes dominate. Memory stays allocated, because
 * the first access to a page costs more than the work in it. */
static void assert_cost_is_linear(const char *name, sized_fn fn, const void *ctx, size_t from,
                                  size_t to) {
    double min_seconds = 1e9, min_steps = 1e9;
    if (!TIMED) to = MAX(to / 8, from);
    for (size_t size = from; size <= to; size *= 2) {
        struct sized_input best = {.seconds = 1e9};
        for (int run = 0; run < (TIMED ? 3 : 1); run++) {
            struct sized_input s = fn(ctx, size);
            if (s.seconds < best.seconds) best = s;
        }
        double bytes = (double)best.bytes, steps = (double)best.steps;
        if (getenv("SHOAL_COST"))
            fprintf(stderr, "%-24s %9zu bytes %8.2f ns a byte %7.3f steps\n", name, best.bytes,
                    best.seconds / bytes * 1e9, steps / bytes);
        min_seconds = MIN(min_seconds, best.seconds / bytes);
        min_steps = MIN(min_steps, steps / bytes);
        if (steps / bytes > 1.6 * min_steps)
            fail_msg("%s: %.3f steps a byte at %zu bytes, %.3f before", name, steps / bytes,
                     best.bytes, min_steps);
        if (TIMED && best.seconds > 0.01 && best.seconds / bytes > 3 * min_seconds)
            fail_msg("%s: %.1f ns a byte at %zu bytes, %.1f before", name,
                     best.seconds / bytes * 1e9, best.bytes, min_seconds * 1e9);
    }
}

static size_t json_bytes(const json_t *v) {
    return json_dumpb(v, NULL, 0, JSON_COMPACT);
}

static struct sized_input sized_render(const char *template, json_t *vars) {
    struct template_cost r = render(template, vars, 0);
    struct sized_input s = {r.seconds, r.steps, json_bytes(vars) + strlen(template)};
    if (r.rc != OK) fail_msg("'%.60s': %s", template, r.err.text);
    json_decref(vars);
    return s;
}

static struct sized_input sized_kwargs(const void *ctx, size_t n) {
    json_t *vars = json_object();
    char name[32];
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "key%07zu", i);
        json_object_set_new(vars, name, json_integer((json_int_t)i));
    }
    return sized_render(ctx, vars);
}

static struct sized_input sized_messages(const void *ctx, size_t n) {
    return sized_render(ctx, chat_vars(conversation((int)n, 20), NULL));
}

static struct sized_input sized_content(const void *ctx, size_t n) {
    return sized_render(ctx, chat_vars(conversation(4, n / 4), NULL));
}

static struct sized_input sized_tools(const void *ctx, size_t n) {
    return sized_render(ctx, chat_vars(conversation(2, 20), tools((int)n)));
}

/* {l: [["0", 0], ["1", 1] …]} */
static struct sized_input sized_pairs(const void *ctx, size_t n) {
    json_t *list = json_array();
    char name[32];
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "%07zu", i * 7919 % n);
        json_array_append_new(list, json_pack("[s,i]", name, (int)i));
    }
    return sized_render(ctx, json_pack("{s:o}", "l", list));
}

struct repeated {
    const char *before, *part, *after;
    bool text_only; /* parsed, not rendered: it is nested too deeply for rendering */
};

static struct sized_input sized_text(const void *ctx, size_t size) {
    const struct repeated *r = ctx;
    struct buf b = {0};
    struct error err;
    buf_puts(&b, r->before);
    while (b.len + strlen(r->part) + strlen(r->after) <= size) buf_puts(&b, r->part);
    buf_puts(&b, r->after);
    double start = cpu_now();
    struct jinja *j = jinja_parse(b.data, b.len, &err);
    struct sized_input s = {cpu_now() - start, 0, b.len};
    if (!j) fail_msg("'%s': %s", r->part, err.text);
    jinja_free(j);
    if (!r->text_only) {
        json_t *vars = json_object();
        struct template_cost o = render(b.data, vars, 0);
        if (o.rc != OK) fail_msg("'%s': %s", r->part, o.err.text);
        s.seconds = o.seconds;
        s.steps = o.steps;
        json_decref(vars);
    }
    buf_release(&b);
    return s;
}

static void test_flat_variables(void **state) {
    (void)state;
    static const char each[] = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                               "<|im_end|>\n{% endfor %}{{ key0000007 }}{{ nothing }}";
    assert_cost_is_linear("kwargs", sized_kwargs, "{{ key0000007 }}{{ nothing }}", 1 << 10,
                          1 << 16);
    assert_cost_is_linear("messages", sized_messages, each, 1 << 10, 1 << 15);
    assert_cost_is_linear(
        "content", sized_content,
        "{% for m in messages %}{{ m.role + ': ' + m.content|trim }}{% if '</think>' in "
        "m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}",
        1 << 16, 4 << 20);
    assert_cost_is_linear("tools", sized_tools, "{% for t in tools %}{{ t|tojson }}{% endfor %}",
                          64, 4096);
    assert_cost_is_linear("tools, indented", sized_tools, "{{ tools|tojson(indent=4) }}", 64, 4096);
    assert_cost_is_linear("a dict", sized_pairs,
                          "{% set d = dict(l) %}{{ d['0000007'] }}{{ d.nothing }}", 1 << 10,
                          1 << 16);
    assert_cost_is_linear(
        "lookups", sized_pairs,
        "{% set d = dict(l) %}{% for p in l %}{% if p[0] in d %}{% endif %}{% endfor %}", 1 << 10,
        1 << 16);
    assert_cost_is_linear("unique", sized_pairs, "{{ l|map(attribute=0)|unique|list|length }}",
                          1 << 10, 1 << 16);
    assert_cost_is_linear("sort", sized_pairs, "{{ l|map(attribute=0)|sort|length }}", 1 << 10,
                          1 << 16);
    assert_cost_is_linear("sorted keys", sized_pairs, "{{ dict(l)|tojson(sort_keys=true) }}",
                          1 << 10, 1 << 15);
    assert_cost_is_linear("repr", sized_pairs, "{{ l }}{{ dict(l) == dict(l) }}{{ l == l[:] }}",
                          1 << 10, 1 << 15);
}

static void test_flat_texts(void **state) {
    (void)state;
    static const struct repeated texts[] = {
        {"", "text { and # % } \n", "", false},
        {"", "{{ a }}", "", false},
        {"", "  {%- if a -%}  \n b{% endif %}\n", "", false},
        {"", "{# a #}\n", "", false},
        {"{{ '", "a\\n", "' }}", false},
        {"{{ ", "'a' ", "}}", false},
        {"{{ [", "1, ", "1]|length }}", false},
        {"{{ 1 ", "+ 1 ", "}}", true},
        {"{% raw %}", "{{ {% {% end", "{% endraw %}", false},
        {"{% raw %}", "{%           ", "{% endraw %}", false},
        {"{#", " #-} -", "#}", false},
        {"{{", "                ", "1 }}", false},
        {"a", "                ", "{%- if a %}{% endif %}", false},
        {"{{ x", "[0]", "}}", true},
        {"{{ x", "|string", "}}", true},
        {"{% if a %}", "{% elif a %}", "{% endif %}", true},
        {"{{ x(", "a=1, ", ")}}", true},
        {"{% macro m() %}", "{{ a }}", "{% endmacro %}", false},
    };
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        assert_cost_is_linear(texts[i].part, sized_text, &texts[i], 1 << 14,
                              1 << (texts[i].text_only ? 19 : 20));
    struct error err;
    char *text = xcalloc(JINJA_MAX_TEXT + 2, 1);
    memset(text, 'a', JINJA_MAX_TEXT + 1);
    assert_null(jinja_parse(text, JINJA_MAX_TEXT + 1, &err));
    assert_non_null(strstr(err.text, "larger than"));
    free(text);
}

/* Templates of Ollama */

static struct sized_input sized_turns(const void *ctx, size_t n) {
    json_t *messages = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(messages,
                              json_pack("{s:s,s:s}", "role", ctx, "content", "some text"));
    double start = cpu_now();
    json_t *v = go_template_variables(messages);
    struct sized_input s = {cpu_now() - start, 0, json_bytes(messages)};
    json_decref(v);
    json_decref(messages);
    return s;
}

static struct sized_input sized_go(const void *ctx, size_t size) {
    struct buf b = {0}, out = {0};
    struct error err;
    while (b.len + strlen(ctx) <= size) buf_puts(&b, ctx);
    double start = cpu_now();
    if (go_template_jinja(b.data, false, &out, &err) != OK) fail_msg("%s", err.text);
    struct sized_input s = {cpu_now() - start, 0, b.len};
    buf_release(&b);
    buf_release(&out);
    return s;
}

static struct sized_input sized_modelfile(const void *ctx, size_t size) {
    struct buf b = {0};
    struct error err;
    json_t *v = json_object();
    while (b.len + strlen(ctx) <= size) buf_puts(&b, ctx);
    double start = cpu_now();
    if (ollama_modelfile(b.data, v, &err) != OK) fail_msg("%s", err.text);
    struct sized_input s = {cpu_now() - start, 0, b.len};
    json_decref(v);
    buf_release(&b);
    return s;
}

static void test_flat_ollama(void **state) {
    (void)state;
    static const char *const roles[] = {"system", "user", "assistant"};
    static const char *const go[] = {"a 'b' \\ {{ .System }}", "{{ if (not .Prompt) }}{{ end }}",
                                     "{{- /* a */ -}}   ", "{{ \"a\\nb\" }}"};
    static const char *const files[] = {"MESSAGE user hello\n", "PARAMETER stop \"a\"\n",
                                        "# a\n\n  \n",          "SYSTEM \"\"\"a\nb\"\"\"\n",
                                        "PARAMETER top_k 5\n",  "ADAPTER a\n"};
    for (size_t i = 0; i < ARRAY_LEN(roles); i++)
        assert_cost_is_linear(roles[i], sized_turns, roles[i], 1 << 11, 1 << 17);
    for (size_t i = 0; i < ARRAY_LEN(go); i++)
        assert_cost_is_linear(go[i], sized_go, go[i], 1 << 11, 1 << 16);
    for (size_t i = 0; i < ARRAY_LEN(files); i++)
        assert_cost_is_linear(files[i], sized_modelfile, files[i], 1 << 14, 1 << 20);
}

/* stopping */

struct poll_limit {
    int polls, max_polls;
};

static bool poll_limit_reached(void *ctx) {
    struct poll_limit *p = ctx;
    return ++p->polls > p->max_polls;
}

static void test_stop(void **state) {
    (void)state;
    struct error err;
    struct jinja_output out;
    static const char text[] = "{% set l = range(9999)|list %}" IF("-1 in l");
    struct jinja *j = jinja_parse(text, sizeof text - 1, &err);
    for (int max_polls = 0; max_polls < 100; max_polls += 33) {
        struct poll_limit p = {.max_polls = max_polls};
        struct jinja_input in = {
            .vars = NULL, .now = -1, .stop = poll_limit_reached, .stop_ctx = &p};
        in.vars = json_object();
        assert_int_equal(jinja_render(j, &in, &out, &err), ERR_STATE);
        assert_non_null(strstr(err.text, "was ended"));
        assert_int_equal(p.polls, max_polls + 1);
        assert_true(out.steps < (uint64_t)(max_polls + 2) * 100000);
        jinja_output_release(&out);
        json_decref((json_t *)(uintptr_t)in.vars);
    }
    jinja_free(j);
}

/* Number of polls of a conversation with n messages, every second one the assistant's. */
static int chat_polls(const char *template, int n, uint64_t max_polls, int want_rc) {
    struct tokenizer *t = tokenizer_new_bytes(259);
    struct poll_limit p = {.max_polls = (int)max_polls};
    struct token_ids ids = {0};
    struct error err = {0};
    struct chat_template_input chat = {.messages = conversation(n, 40),
                                       .template = template,
                                       .stop = poll_limit_reached,
                                       .stop_ctx = &p};
    int rc = chat_template_encode(t, &chat, &ids, NULL, &err);
    if (rc != want_rc) fail_msg("'%.60s': %d %s", template, rc, rc ? err.text : "");
    token_ids_release(&ids);
    json_decref((json_t *)(uintptr_t)chat.messages);
    tokenizer_free(t);
    return p.polls;
}

/* The header of a template is searched once, also if there is none, and not at each turn. */
static void test_header_is_searched_once(void **state) {
    (void)state;
    static const char text[] = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
                               "{% if messages|length < 1000 or add_generation_prompt %}{{ "
                               "raise_exception('x') }}{% endif %}";
    int small = chat_polls(text, 4096, 1 << 30, OK), large = chat_polls(text, 16384, 1 << 30, OK);
    assert_true(small > 0 && large < 6 * small);
}

static void test_chat_ends(void **state) {
    (void)state;
    static const char slow[] = "{% set l = range(9999)|list %}" IF("-1 in l");
    /* rendering the header reaches the limit */
    static const char header[] =
        "{% for m in messages %}{{ m.role }}{% endfor %}"
        "{% if add_generation_prompt %}{% set l = range(9999)|list %}" IF("-1 in l") "{% endif %}";
    assert_int_equal(chat_polls(slow, 4, 10, ERR_STATE), 11);
    assert_int_equal(chat_polls(header, 4, 10, ERR_STATE), 11);
    /* one budget for all renderings of a conversation, a quarter of it for a template in the
     * request */
    int all = (int)(JINJA_MAX_STEPS >> 18);
    assert_true(chat_polls(slow, 4, 1 << 30, ERR_FORMAT) <= all + 1);
    assert_true(chat_polls(header, 4, 1 << 30, ERR_FORMAT) <= all + 3);
}

int main(void) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_long_conversations),
        cmocka_unit_test(test_flat_variables),
        cmocka_unit_test(test_flat_texts),
        cmocka_unit_test(test_flat_ollama),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_header_is_searched_once),
        cmocka_unit_test(test_chat_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
