/*
 * test_memory: texts, documents, the knowledge base, conversations and roles.
 *
 * The test's embedder counts the characters of a text by their hashes, so that texts with common
 * characters are similar. It counts the texts that it embeds, which shows the effect of the cache.
 * Word scores are compared with a search without an index.
 */
#define _GNU_SOURCE
#include "folder.h"
#include "memory/internal.h"
#include "swarm/swarm.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char dir[64], db[96];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-memory-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(db, sizeof db, "%s/base.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

/* Lines of a table in test/cases, split at " | "; fn gets the fields. */
static void cases_run(const char *path, int fields, void (*fn)(char **field, const char *where)) {
    FILE *f = fopen(path, "r");
    char line[1024], where[64];
    int n = 0, ran = 0;
    if (!f) fail_msg("no '%s': run the tests from the checkout", path);
    while (fgets(line, sizeof line, f)) {
        char *field[4], *at = line;
        n++;
        line[strcspn(line, "\n")] = 0;
        if (!*line || *line == '#') continue;
        for (int i = 0; i < fields; i++) {
            field[i] = at;
            char *bar = i < fields - 1 ? strstr(at, i == 0 && *at == ' ' ? "| " : " | ") : NULL;
            if (i < fields - 1 && !bar) fail_msg("%s, line %d: a field is missing", path, n);
            if (!bar) break;
            at = bar + (*bar == '|' ? 2 : 3);
            *bar = 0;
        }
        snprintf(where, sizeof where, "%s, line %d", path, n);
        fn(field, where);
        ran++;
    }
    fclose(f);
    assert_true(ran > 10);
}

/* roles */

static void role_case(char **field, const char *where) {
    int want = question_type_find(field[2]);
    if (want < 0) fail_msg("%s: no type '%s'", where, field[2]);
    int got = question_classify(field[1], strcmp(field[0], "legacy") == 0);
    if (got != want)
        fail_msg("%s: '%s' is %s, not %s", where, field[1], question_type_names[got], field[2]);
}

static void test_question_types(void **state) {
    (void)state;
    cases_run("test/cases/roles.txt", 3, role_case);
    assert_int_equal(question_classify("", false), QUESTION_DEFAULT);
    assert_int_equal(question_classify("\xff\xfe hi", false), QUESTION_CONVERSATIONAL);
}

static void test_roles(void **state) {
    (void)state;
    static const float temperatures[N_QUESTION_TYPES][5] = {{0.7f, 0.8f, 0.6f, 0.7f, 0.7f},
                                                            {0.7f, 0.9f, 0.7f, 0.6f, 0.7f},
                                                            {0.5f, 0.6f, 0.7f, 0.5f, 0.6f},
                                                            {0.8f, 0.7f, 0.8f, 0.7f, 0.8f},
                                                            {0.7f, 0.6f, 0.7f, 0.6f, 0.7f}};
    for (int t = 0; t < N_QUESTION_TYPES; t++)
        for (int l = 0; l < N_LANGUAGES; l++)
            for (int i = 0; i < 5; i++) {
                struct agent_role r = agent_role_get((enum question_type)t, (enum language)l, i);
                assert_true(r.temperature == temperatures[t][i]);
                assert_true(*r.name && *r.description);
                assert_int_equal(language_detect(r.description),
                                 l == LANG_ZH ? LANG_ZH : (enum language)l);
            }
    assert_int_equal(agent_role_count(QUESTION_PLANNING), 4);
    assert_string_equal(agent_role_get(QUESTION_DISCUSSION, LANG_JA, 5).name, "批判的思考AI");
}

/* rules */

/* Replaces the escapes "\\n", "\\|", "\\u0007" and "\\xff" of a table. */
static void unescape(char *text) {
    static const struct {
        const char *from;
        char to;
    } known[] = {{"\\n", '\n'}, {"\\|", '|'}, {"\\u0007", 7}, {"\\xff", '\xff'}};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        for (char *at; (at = strstr(text, known[i].from));) {
            size_t n = strlen(known[i].from);
            *at = known[i].to;
            memmove(at + 1, at + n, strlen(at + n) + 1);
        }
}

static void cleanup_case(char **field, const char *where) {
    struct buf out = {0};
    unescape(field[1]);
    unescape(field[2]);
    bool good = answer_clean(field[1], strcmp(field[0], "cut") == 0, &out);
    const char *got = good ? out.data : "-";
    if (strcmp(got, field[2]) != 0)
        fail_msg("%s: '%s' is '%s', not '%s'", where, field[1], got, field[2]);
    buf_release(&out);
}

static void test_cleanup(void **state) {
    (void)state;
    cases_run("test/cases/cleanup.txt", 3, cleanup_case);
    for (int l = 0; l < N_LANGUAGES; l++) {
        assert_int_equal(language_detect(answer_fallback((enum language)l)), l);
        struct buf out = {0}; /* the fallback text needs no cleaning */
        assert_true(answer_clean(answer_fallback((enum language)l), true, &out));
        assert_string_equal(out.data, answer_fallback((enum language)l));
        buf_release(&out);
    }
}

/* answer_clean never lengthens a text of any bytes, and neither does a second pass. */
static void test_cleanup_of_anything(void **state) {
    (void)state;
    static const char *const parts[] = {"あ", "。", "the ",    "**",   "`",     "[a](",
                                        "\n", "7",  "<think>", "\xff", "ab ab "};
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (int i = 0; i < 300; i++) {
        struct buf text = {0}, once = {0}, twice = {0};
        for (uint32_t n = 1 + rng_below(&r, 40); n > 0; n--)
            buf_puts(&text, parts[rng_below(&r, ARRAY_LEN(parts))]);
        if (answer_clean(text.data, false, &once)) {
            assert_true(once.len <= text.len);
            assert_int_equal(answer_clean(once.data, true, &twice) && twice.len > once.len, 0);
        }
        buf_release(&text);
        buf_release(&once);
        buf_release(&twice);
    }
    struct buf large = {0}, out = {0};
    for (int i = 0; i < 20000; i++) buf_printf(&large, "%d ", i * 7919 % 10007);
    assert_true(answer_clean(large.data, true, &out));
    buf_release(&large);
    buf_release(&out);
}

static void fact_case(char **field, const char *where) {
    json_t *want = json_loads(field[1], 0, NULL), *got = facts_extract(field[0]);
    char *text = json_canonical(got);
    if (!want || !json_equal(want, got)) fail_msg("%s: '%s' gives %s", where, field[0], text);
    free(text);
    json_decref(want);
    json_decref(got);
}

/* Facts that the rules extract can be merged. */
static void test_facts_extracted_by_rules(void **state) {
    (void)state;
    cases_run("test/cases/facts.txt", 2, fact_case);
    struct conversation *c = conversation_open(NULL, "x", &err);
    json_t *facts = facts_extract("My name is Ann. I like tea and cakes.");
    assert_int_equal(conversation_merge_facts(c, facts, &err), OK);
    struct buf text = {0};
    assert_true(conversation_answer_from_facts(c, "What do I like?", &text));
    assert_string_equal(text.data, "You like tea, cakes.");
    buf_release(&text);
    json_decref(facts);
    conversation_close(c);
}

/* Of the facts that a model extracts, only those that the text supports are kept. */
static void test_facts_grounded(void **state) {
    (void)state;
    static const struct {
        const char *source, *claimed, *want;
    } cases[] = {
        {"I live in Osaka and play the violin.",
         "{'name': 'Maria', 'interests': ['the violin', 'football'], 'other': ['lives in Osaka']}",
         "{'interests': ['the violin'], 'other': ['lives in Osaka']}"},
        {"大阪でバイオリンを弾いています。",
         "{'名前': '太郎', '興味': ['バイオリン', '将棋'], '好きなもの': []}",
         "{'興味': ['バイオリン'], '好きなもの': []}"},
        {"我在上海学习小提琴。", "{'名字': null, '兴趣': ['小提琴', '足球'], '其他': ['在上海']}",
         "{'兴趣': ['小提琴'], '其他': ['在上海']}"},
        {"It is the one.", "{'name': 'the', 'likes': ['is the', 'a']}", "{'likes': []}"},
        {"", "{'name': 'x', 'likes': ['y']}", "{'likes': []}"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *claimed = xstrdup(cases[i].claimed), *want = xstrdup(cases[i].want);
        for (char *p = claimed; (p = strchr(p, '\''));) *p = '"';
        for (char *p = want; (p = strchr(p, '\''));) *p = '"';
        json_t *facts = json_loads(claimed, 0, NULL), *good = json_loads(want, 0, NULL),
               *got = facts_filter_grounded(facts, cases[i].source);
        char *text = json_canonical(got);
        if (!json_equal(got, good)) fail_msg("'%s': %s", cases[i].source, text);
        free(text);
        free(claimed);
        free(want);
        json_decref(facts);
        json_decref(good);
        json_decref(got);
    }
}

/* text */

static void test_languages(void **state) {
    (void)state;
    static const struct {
        const char *text;
        enum language want;
    } cases[] = {{"", LANG_EN},         {"hello", LANG_EN},     {"Grüße, Здравствуй", LANG_EN},
                 {"これは本", LANG_JA}, {"東京都", LANG_JA},    {"ｶﾀｶﾅ", LANG_JA},
                 {"你好吗", LANG_ZH},   {"我的名字", LANG_ZH},  {"Linux的安装", LANG_ZH},
                 {"𠮷野家", LANG_JA},   {"AIについて", LANG_JA}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        assert_int_equal(language_detect(cases[i].text), cases[i].want);
}

static void test_cut(void **state) {
    (void)state;
    assert_int_equal(utf8_prefix_len("日本語", 9, 2), 6);
    assert_int_equal(utf8_prefix_len("日本語", 9, 5), 9);
    assert_int_equal(utf8_prefix_len("a\xe6\x97", 3, 2),
                     3); /* an incomplete character counts as one */
    assert_int_equal(utf8_prefix_len("", 0, 1), 0);
}

/* Properties of any splitting into chunks: bounded, in order, only white space is lost. */
static void chunks_check(const char *text, int chars) {
    struct text_chunk *v;
    size_t len = strlen(text), at = 0;
    int n = text_split_chunks(text, len, chars, &v);
    for (int i = 0; i < n; i++) {
        assert_true(v[i].begin >= at && v[i].begin < v[i].end && v[i].end <= len);
        assert_true(utf8_prefix_len(text + v[i].begin, v[i].end - v[i].begin, (size_t)chars) ==
                    v[i].end - v[i].begin);
        for (; at < v[i].begin; at++) assert_non_null(strchr(" \t\r\n\xE3\x80", text[at]));
        at = v[i].end;
    }
    for (; at < len; at++) assert_non_null(strchr(" \t\r\n\xE3\x80", text[at]));
    free(v);
}

static void test_chunks(void **state) {
    (void)state;
    static const char text[] =
        "最初の段落です。短い。\n\n第二段。这是一个比较长的段落，有两个句子。"
        "第二句话在这里结束！\n \nA third paragraph. It has two sentences.\n"
        "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz";
    for (int chars = 16; chars < 200; chars += 7) chunks_check(text, chars);
    chunks_check("", 16);
    chunks_check(" \n\n　\n", 16);
    struct text_chunk *v;
    int n = text_split_chunks(text, sizeof text - 1, 30, &v);
    assert_int_equal(v[0].begin, 0); /* a paragraph that fits is not split */
    assert_memory_equal(text + v[0].end - 3, "。", 3);
    assert_true(n > 4);
    assert_memory_equal(text + v[1].end - 3, "。", 3); /* a sentence too */
    free(v);
}

static void assert_document(int (*read)(const char *, size_t, struct buf *, struct buf *,
                                        struct error *),
                            const char *doc, const char *title, const char *text) {
    struct buf t = {0}, b = {0};
    buf_puts(&t, "");
    buf_puts(&b, "");
    if (read(doc, strlen(doc), &t, &b, &err) != OK) fail_msg("%s", err.text);
    assert_string_equal(t.data, title);
    assert_string_equal(b.data, text);
    buf_release(&t);
    buf_release(&b);
}

static void test_html(void **state) {
    (void)state;
    assert_document(
        document_read_html,
        "\xEF\xBB\xBF<!DOCTYPE html><html><head><title> 富士山 &amp; 湖 </title>\n"
        "<style>p { color: red }</style><script>if (a < b) x = '</p>';</script></head>"
        "<body><!-- <p>no</p> --><h1>高さ</h1><p>標高は\n <b>3776</b>&nbsp;m。<p>次&#x306E;"
        "&#27573;落<br>改行<ul><li>一<li>二</ul></body>",
        "富士山 & 湖", "高さ\n\n標高は 3776 m。\n\n次の段落\n改行\n\n一\n二");
    assert_document(document_read_html, "a < b && c > d &unknown; &#xD800; &#; &", "",
                    "a < b && c > d &unknown; \xEF\xBF\xBD &#; &");
    assert_document(document_read_html, "<a href='x>y' title=don't>t</a> <pre>l1\nl2</pre><x", "",
                    "t\n\nl1\nl2");
    assert_document(document_read_html, "<p title=\"open>text<p>more", "", "text\n\nmore");
    assert_document(document_read_html, "x<script>never closed <p>y", "", "x");
    assert_document(document_read_html, "a <svg width=1 /> b <math/>c <svg><p>no</p></svg>d", "",
                    "a b c d");
    assert_document(document_read_html, "a<script/>no</script> b", "", "a b");
    assert_document(document_read_html, "", "", "");
    struct buf t = {0};
    assert_int_equal(document_read_html("a\xff", 2, &t, &t, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "not UTF-8 at byte offset 1"));
    assert_int_equal(document_read_html("a\0b", 3, &t, &t, &err), ERR_FORMAT);
}

static void test_markdown(void **state) {
    (void)state;
    assert_document(
        document_read_markdown,
        "---\nauthor: x\ntitle: \"手引き\"\n---\n# はじめに\n本文は**強調**と`code`、"
        "[リンク](http://x/)と![図](a.png)。\n\n> 引用\n- 項目\n\n```c\n  int *x[1](2);\n```\n"
        "| a | b |\n|---|---|\n",
        "手引き",
        "はじめに\n\n本文は強調とcode、リンクと図。\n\n引用\n- 項目\n\n  int *x[1](2);\n"
        "| a | b |");
    assert_document(document_read_markdown, "## Title ##\r\ntext\r\n===\r\nmore", "Title",
                    "Title\n\ntext\n\nmore");
    assert_document(document_read_markdown, "---\r\ntitle: T\r\ntags: x\r\n---\r\nbody\r\n", "T",
                    "body");
    assert_document(document_read_markdown, "#hashtag [not a link] [a](b", "",
                    "#hashtag [not a link] [a](b");
    assert_document(document_read_markdown, "", "", "");
}

/* terms */

static void assert_terms(const char *text, const char *want) {
    struct buf b = {0};
    int64_t n, spaces = 0;
    assert_int_equal(terms_index(text, strlen(text), &b, &n, &err), OK);
    assert_string_equal(b.data, want);
    for (size_t i = 0; i < b.len; i++) spaces += b.data[i] == ' ';
    assert_int_equal(n, spaces);
    buf_release(&b);
}

static void test_terms(void **state) {
    (void)state;
    assert_terms("", "");
    assert_terms("The QUICK fox's 2nd Ｌａｐ", "the quick fox s 2nd lap ");
    assert_terms("東京都の人口", "東京 京都 都 の 人口 口 ");
    assert_terms("ﾊﾞｽ", "バス ス ");
    assert_terms("大Ａ小", "大 a 小 ");
    assert_terms("Ünïcode straße", "ünïcode straße ");
    struct query_term q[QUERY_TERMS];
    assert_int_equal(terms_query("高い山は？ 山", q, &err), 4);
    assert_string_equal(q[0].text, "高");
    assert_true(q[0].prefix && q[0].weight == 1);
    assert_true(q[1].prefix && q[1].weight < 1);
    char longest[400];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    assert_int_equal(terms_query(longest, q, &err), 1);
    assert_int_equal(strlen(q[0].text), TERM_BYTES);
    struct buf many = {0};
    for (int i = 0; i < 1000; i++) buf_printf(&many, "w%d ", i);
    assert_int_equal(terms_query(many.data, q, &err), QUERY_TERMS);
    buf_release(&many);
}

/* knowledge */

static const char *temp_path(const char *name) {
    static char paths[4][128];
    static int next;
    char *p = paths[next++ % 4];
    snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void write_file(const char *name, const char *text) {
    if (file_write(temp_path(name), text, strlen(text), &err) != OK) fail_msg("%s", err.text);
}

/* A folder with a file of each kind. */
static void write_folder(void) {
    assert_int_equal(dir_make(temp_path("docs/sub"), &err), OK);
    write_file(
        "docs/fuji.txt",
        "富士山は日本で一番高い山で、標高は3776メートルです。\n\n静岡県と山梨県にまたがる。");
    write_file("docs/tides.md",
               "# Tides\n\nThe moon pulls the sea, so the water rises twice a day.");
    write_file("docs/sub/beijing.html",
               "<title>北京</title><p>北京是中国的首都，人口约两千一百万。<p>故宫在北京的中心。");
    write_file("docs/qa.jsonl", "{\"title\": \"犬\", \"content\": \"子犬は犬の子供です。\"}\n"
                                "{\"text\": \"猫は木に登ります。\", \"id\": 7}\n");
    write_file("docs/notes.bin", "skipped");
    write_file("docs/.hidden.txt", "skipped");
}

static struct knowledge *open_ok(void) {
    struct knowledge *k = knowledge_open(db, true, &err);
    if (!k) fail_msg("%s", err.text);
    return k;
}

static struct knowledge_report add_ok(struct knowledge *k, const char *name,
                                      const struct embedder *e) {
    struct knowledge_report r;
    struct knowledge_options o = {.embedder = e};
    if (knowledge_add(k, temp_path(name), &o, &r, &err) != OK) fail_msg("%s", err.text);
    return r;
}

static json_t *search_ok(struct knowledge *k, const char *text, double threshold,
                         const struct embedder *e) {
    struct knowledge_query q = {.text = text, .threshold = threshold, .embedder = e};
    json_t *hits = knowledge_search(k, &q, &err);
    if (!hits) fail_msg("%s", err.text);
    return hits;
}

static const char *hit_text(const json_t *hits, size_t i, const char *key) {
    const char *text = json_string_value(json_object_get(json_array_get(hits, i), key));
    return text ? text : "";
}

/* The title of the best hit at the default threshold, or "-". */
static void assert_best(struct knowledge *k, const char *query, const char *title) {
    json_t *hits = search_ok(k, query, 0, NULL);
    const char *got = json_array_size(hits) ? hit_text(hits, 0, "title") : "-";
    if (strcmp(got, title) != 0) fail_msg("'%s' finds '%s', not '%s'", query, got, title);
    json_decref(hits);
}

static void test_search(void **state) {
    (void)state;
    write_folder();
    struct knowledge *k = open_ok();
    struct knowledge_report r = add_ok(k, "docs", NULL);
    assert_int_equal(r.added, 4);
    assert_int_equal(r.skipped, 1);
    assert_int_equal(r.documents, 5);
    assert_int_equal(r.chunks, 5);
    assert_best(k, "富士山の高さは何メートルですか？", "fuji");
    assert_best(k, "標高", "fuji");
    assert_best(k, "ＭＯＯＮ", "Tides");
    assert_best(k, "What does the moon do to the sea?", "Tides");
    assert_best(k, "北京的人口是多少？", "北京");
    assert_best(k, "首都", "北京");
    assert_best(k, "犬", "犬");
    assert_best(k, "木", "qa");
    assert_best(k, "電車", "-");
    assert_best(k, "？！", "-");
    json_t *hits = search_ok(k, "山", -1, NULL);
    assert_int_equal(json_array_size(hits), 5); /* no threshold: the best five of five */
    json_decref(hits);
    knowledge_close(k);
}

static void test_snippets(void **state) {
    (void)state;
    struct buf b = {0};
    json_t *hits = json_pack("[{s:s,s:s},{s:s,s:s}]", "title", "北京", "content", "首都\n人口",
                             "title", "a", "content", "bcdefg");
    knowledge_snippets(hits, 5, &b);
    assert_string_equal(b.data, "【北京】 首都 人口\n【a】 bcdef…\n");
    buf_release(&b);
    json_decref(hits);
}

/* The complete search result as text, without the ids, which depend on the history of the file. */
static char *search_text(struct knowledge *k, const char *query, const struct embedder *e) {
    json_t *hits = search_ok(k, query, -1, e), *v;
    size_t i;
    json_array_foreach (hits, i, v) json_object_del(v, "id");
    char *text = json_canonical(hits);
    json_decref(hits);
    return text;
}

static const char *const queries_of_changes[] = {"富士山", "the moon and the sea", "北京 人口",
                                                 "犬 猫"};

/* The knowledge base gives the same results as a new one with the same files. */
static void assert_same_as_fresh(struct knowledge *k, const struct embedder *e) {
    char fresh[128];
    snprintf(fresh, sizeof fresh, "%s/fresh.db", dir);
    unlink(fresh);
    struct knowledge *f = knowledge_open(fresh, true, &err);
    assert_non_null(f);
    add_ok(f, "docs", NULL);
    for (size_t i = 0; i < ARRAY_LEN(queries_of_changes); i++) {
        char *a = search_text(k, queries_of_changes[i], e),
             *b = search_text(f, queries_of_changes[i], e);
        assert_string_equal(a, b);
        free(a);
        free(b);
    }
    knowledge_close(f);
}

static void test_changes(void **state) {
    (void)state;
    write_folder();
    struct knowledge *k = open_ok();
    add_ok(k, "docs", NULL);
    struct knowledge_report r = add_ok(k, "docs", NULL);
    assert_int_equal(r.unchanged, 4);
    assert_int_equal(r.added + r.changed + r.removed, 0);
    write_file("docs/fuji.txt", "富士山は火山です。");
    write_file("docs/new.txt", "潮汐由月球引起。");
    assert_int_equal(unlink(temp_path("docs/qa.jsonl")), 0);
    r = add_ok(k, "docs", NULL);
    assert_int_equal(r.changed, 1);
    assert_int_equal(r.added, 1);
    assert_int_equal(r.removed, 1);
    assert_int_equal(r.unchanged, 2);
    assert_int_equal(r.documents, 4);
    assert_best(k, "猫", "-");
    assert_best(k, "火山", "fuji");
    assert_best(k, "標高", "-");
    assert_same_as_fresh(k, NULL);
    json_t *list = knowledge_list(k, &err);
    assert_int_equal(json_array_size(list), 4);
    json_decref(list);
    assert_int_equal(knowledge_remove(k, temp_path("docs/sub"), &r, &err), OK);
    assert_int_equal(r.removed, 1);
    assert_int_equal(knowledge_remove(k, temp_path("docs/sub"), &r, &err), ERR_MISSING);
    assert_best(k, "首都", "-");
    knowledge_close(k);
}

/* After a change of the chunk size the files are split again. */
static void test_chunk_size(void **state) {
    (void)state;
    write_folder();
    struct knowledge *k = open_ok();
    struct knowledge_report r;
    add_ok(k, "docs", NULL);
    struct knowledge_options o = {.chunk_chars = 30};
    assert_int_equal(knowledge_add(k, temp_path("docs"), &o, &r, &err), OK);
    assert_int_equal(r.changed, 4);
    assert_true(r.chunks > 5);
    knowledge_close(k);
}

static void test_bad_files(void **state) {
    (void)state;
    write_folder();
    struct knowledge *k = open_ok();
    struct knowledge_report r;
    struct knowledge_options o = {0};
    add_ok(k, "docs", NULL);
    write_file("docs/fuji.txt", "\xff\xfe bad");
    write_file("docs/qa.jsonl", "{\"text\": \"新しい\"}\n{\"nothing\": 1}\n");
    int stderr_was = dup(2);
    assert_non_null(freopen("/dev/null", "w", stderr)); /* two warnings */
    r = add_ok(k, "docs", NULL);
    fflush(stderr);
    dup2(stderr_was, 2);
    close(stderr_was);
    assert_int_equal(r.refused, 2);
    assert_best(k, "標高", "fuji"); /* as it was */
    assert_best(k, "新しい", "-");  /* no part of the file was added */
    assert_int_equal(knowledge_add(k, temp_path("docs/qa.jsonl"), &o, &r, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "qa.jsonl"));
    assert_non_null(strstr(err.text, "line 2"));
    assert_int_equal(knowledge_add(k, temp_path("docs/notes.bin"), &o, &r, &err), ERR_USAGE);
    assert_int_equal(knowledge_add(k, temp_path("none"), &o, &r, &err), ERR_MISSING);
    struct knowledge_query q = {.text = "\xff"};
    assert_null(knowledge_search(k, &q, &err));
    assert_int_equal(err.code, ERR_USAGE);
    knowledge_close(k);
}

static void test_other_databases(void **state) {
    (void)state;
    struct store *s = store_open(db, &err);
    store_close(s);
    assert_null(knowledge_open(db, true, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_non_null(strstr(err.text, "is not a knowledge base"));
    write_file("text.db", "this is a text that is no database at all, and longer than a header is");
    assert_null(knowledge_open(temp_path("text.db"), true, &err));
    assert_null(knowledge_open(temp_path("none.db"), false, &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_false(path_exists(temp_path("none.db")));
}

/* An embedding that counts characters. */
enum { D = 64 };
static int embedded_texts, embedding_fails;

static int bag_embed(void *ctx, const char *const *texts, int n, float *out, struct error *e) {
    (void)ctx;
    if (embedding_fails) return error_set(e, ERR_STATE, "no embeddings today");
    for (int i = 0; i < n; i++) {
        memset(out + i * D, 0, sizeof *out * D);
        for (const char *p = texts[i]; *p;) {
            size_t k = utf8_prefix_len(p, strlen(p), 1);
            out[i * D + (int)(hash_fnv1a(p, k) % D)] += 1;
            p += k;
        }
    }
    embedded_texts += n;
    return OK;
}

static const struct embedder bag = {NULL, D, "bag", bag_embed};

static void test_embeddings(void **state) {
    (void)state;
    write_folder();
    struct knowledge *k = open_ok();
    struct knowledge_report r = add_ok(k, "docs", &bag);
    assert_int_equal(r.embedded, 5);
    assert_int_equal(add_ok(k, "docs", &bag).embedded, 0);
    embedded_texts = 0;
    json_t *hits = search_ok(k, "子犬は犬の子供です。", 0, &bag);
    assert_int_equal(embedded_texts, 1); /* the query */
    const json_t *best = json_array_get(hits, 0);
    assert_string_equal(hit_text(hits, 0, "title"), "犬");
    double score = json_real_value(json_object_get(best, "score")),
           words = json_real_value(json_object_get(best, "words")),
           cosine = json_real_value(json_object_get(best, "cosine"));
    assert_true(cosine > 0.9 && fabs(score - 0.5 * words - 0.5 * cosine) < 1e-12);
    json_decref(hits);
    write_file("docs/fuji.txt", "富士山は火山です。");
    assert_int_equal(add_ok(k, "docs", &bag).embedded, 1);
    assert_same_as_fresh(k, &bag);
    struct embedder other = bag;
    other.model_hash = "another";
    assert_int_equal(add_ok(k, "docs", &other).embedded, 5);
    embedding_fails = 1;
    other.model_hash = "third";
    struct knowledge_query q = {.text = "x", .embedder = &other};
    assert_null(knowledge_search(k, &q, &err));
    assert_string_equal(err.text, "no embeddings today");
    embedding_fails = 0;
    assert_best(k, "火山", "fuji");
    knowledge_close(k);
}

/* BM25 from its definition, over every text. */
static double naive_word_score(const char *const *docs, int n, int which, const char *query) {
    struct query_term t[QUERY_TERMS];
    int n_terms = terms_query(query, t, &err);
    double total = 0, possible = 0, score = 0;
    struct buf terms[8] = {{0}};
    int64_t lengths[8];
    for (int d = 0; d < n; d++) {
        assert_int_equal(terms_index(docs[d], strlen(docs[d]), &terms[d], &lengths[d], &err), OK);
        total += (double)lengths[d];
    }
    for (int i = 0; i < n_terms; i++) {
        double df = 0, tf = 0;
        for (int d = 0; d < n; d++) {
            double hits = 0;
            char *copy = xstrdup(terms[d].data), *at = copy;
            for (char *w; (w = strsep(&at, " "));)
                hits += t[i].prefix ? *w && strncmp(w, t[i].text, strlen(t[i].text)) == 0
                                    : strcmp(w, t[i].text) == 0;
            free(copy);
            df += hits > 0;
            if (d == which) tf = hits;
        }
        df = MAX(df, 1);
        double idf = t[i].weight * math_log(1 + (n - df + 0.5) / (df + 0.5));
        possible += idf;
        score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * (double)lengths[which] * n / total));
    }
    for (int d = 0; d < n; d++) buf_release(&terms[d]);
    return MIN(score / possible, 1);
}

static void test_bm25_scores(void **state) {
    (void)state;
    static const char *const bodies[] = {"the sea and the moon and the sea", "日本の山と海、山の上",
                                         "月亮和大海 the moon", "x"};
    static const char *const queries[] = {"moon sea", "山", "山の海", "大海 the", "nothing"};
    struct knowledge *k = open_ok();
    char *docs[4];
    assert_int_equal(dir_make(temp_path("d"), &err), OK);
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "d/%d.txt", i);
        write_file(name, bodies[i]);
        docs[i] = xasprintf("%d\n%s", i, bodies[i]); /* the title is the file's name */
    }
    add_ok(k, "d", NULL);
    for (size_t q = 0; q < ARRAY_LEN(queries); q++) {
        json_t *hits = search_ok(k, queries[q], -1, NULL), *v;
        size_t i;
        assert_int_equal(json_array_size(hits), 4);
        json_array_foreach (hits, i, v) {
            int d = *json_string_value(json_object_get(v, "title")) - '0';
            double want = naive_word_score((const char *const *)docs, 4, d, queries[q]),
                   got = json_real_value(json_object_get(v, "words"));
            if (fabs(want - got) > 1e-9)
                fail_msg("'%s' in %d: %g, not %g", queries[q], d, got, want);
        }
        json_decref(hits);
    }
    for (int i = 0; i < 4; i++) free(docs[i]);
    knowledge_close(k);
}

/* A child process adds and changes files until it is killed; the knowledge base is then consistent.
 */
static void test_kill(void **state) {
    (void)state;
    write_folder();
    for (int delay = 5; delay < 60; delay += 25) {
        pid_t child = fork();
        if (child == 0) {
            struct knowledge *k = open_ok();
            for (int i = 0;; i++) {
                char text[64];
                snprintf(text, sizeof text, "版 %d の 文章", i);
                write_file("docs/new.txt", text);
                add_ok(k, "docs", &bag);
            }
        }
        usleep((useconds_t)delay * 1000);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        struct knowledge *k = open_ok();
        add_ok(k, "docs", NULL);
        assert_same_as_fresh(k, &bag);
        knowledge_close(k);
    }
}

/* conversations */

static int shorten(void *ctx, const char *previous, const char *exchanges, struct buf *out,
                   struct error *e) {
    int *left = ctx;
    if (left && (*left)-- == 0) return error_set(e, ERR_STATE, "no summary");
    int n = 0;
    for (const char *p = exchanges; *p; p++) n += *p == '\n';
    buf_printf(out, "%s[%d行]", previous, n);
    return OK;
}

static struct conversation *conversation_start(struct store *s) {
    struct conversation *c = conversation_open(s, "会話1", &err);
    if (!c) fail_msg("%s", err.text);
    return c;
}

static void exchange_add(struct conversation *c, int i, const struct summarizer *s) {
    char user[32], assistant[32];
    snprintf(user, sizeof user, "質問%d", i);
    snprintf(assistant, sizeof assistant, "答え%d", i);
    assert_int_equal(conversation_add(c, user, assistant, s, &err), OK);
}

static const char *first_user(const struct conversation *c) {
    const json_t *list = json_object_get(conversation_state(c), "exchanges");
    return json_string_value(json_object_get(json_array_get(list, 0), "user"));
}

static void test_conversation(void **state) {
    (void)state;
    struct store *s = store_open(db, &err);
    struct conversation *c = conversation_start(s);
    struct summarizer sum = {NULL, shorten};
    struct buf text = {0};
    conversation_context(c, LANG_JA, 0, &text);
    assert_int_equal(text.len, 0);
    for (int i = 1; i <= 11; i++) exchange_add(c, i, &sum);
    assert_string_equal(json_string_value(json_object_get(conversation_state(c), "summary")),
                        "[10行]");
    assert_string_equal(first_user(c), "質問6");
    json_t *facts = json_pack("{s:s,s:[s,s],s:n}", "name", "Ann", "趣味", "囲碁", "将棋", "other");
    assert_int_equal(conversation_merge_facts(c, facts, &err), OK);
    assert_int_equal(conversation_merge_facts(c, facts, &err), OK); /* nothing new */
    conversation_close(c);
    store_close(s);
    s = store_open(db, &err); /* all of it is stored again */
    c = conversation_start(s);
    conversation_context(c, LANG_JA, 0, &text);
    assert_non_null(strstr(text.data,
                           "これまでの要約：[10行]\n覚えていること：名前：Ann；興味：囲碁、"
                           "将棋\nユーザー：質問6\nアシスタント：答え6\n"));
    text.len = 0;
    conversation_context(c, LANG_EN, 105, &text);
    assert_string_equal(text.data,
                        "Summary so far: [10行]\nKnown facts: name: Ann; interests: 囲碁, "
                        "将棋\nUser: 質問11\nAssistant: 答え11\n");
    text.len = 0;
    conversation_context(c, LANG_ZH, 7, &text);
    assert_string_equal(text.data, "此前的摘要：[");
    buf_release(&text);
    assert_int_equal(conversation_clear(c, &err), OK);
    assert_null(first_user(c));
    json_decref(facts);
    conversation_close(c);
    store_close(s);
}

static void test_conversation_without_summary(void **state) {
    (void)state;
    struct conversation *c = conversation_start(NULL);
    for (int i = 1; i <= 25; i++) exchange_add(c, i, NULL);
    assert_string_equal(first_user(c), "質問16");
    int left = 0;
    struct summarizer failing = {&left, shorten};
    assert_int_equal(conversation_add(c, "a", "b", &failing, &err), ERR_STATE);
    assert_string_equal(first_user(c), "質問16"); /* as before */
    assert_int_equal(conversation_add(c, "\xff", "b", NULL, &err), ERR_USAGE);
    char *large = xcalloc(1, CONVERSATION_MAX_TEXT + 10);
    memset(large, 'x', CONVERSATION_MAX_TEXT - 1);
    strcat(large, "漢字");
    assert_int_equal(conversation_add(c, large, "", NULL, &err), OK);
    free(large);
    conversation_close(c);
}

static void test_facts(void **state) {
    (void)state;
    struct conversation *c = conversation_start(NULL);
    static const char *const wrong[] = {
        "[]", "{\"age\": 3}", "{\"name\": 3}", "{\"likes\": [1]}", "{\"likes\": {}}", "3"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        json_t *v = json_loads(wrong[i], JSON_DECODE_ANY, NULL);
        assert_int_equal(conversation_merge_facts(c, v, &err), ERR_FORMAT);
        json_decref(v);
    }
    for (int i = 0; i < CONVERSATION_MAX_FACTS + 3; i++) {
        json_t *v = json_pack("{s:o}", "好きなもの", json_sprintf("物%d", i));
        assert_int_equal(conversation_merge_facts(c, v, &err), OK);
        json_decref(v);
    }
    const json_t *likes =
        json_object_get(json_object_get(conversation_state(c), "facts"), "好きなもの");
    assert_int_equal(json_array_size(likes), CONVERSATION_MAX_FACTS);
    assert_string_equal(json_string_value(json_array_get(likes, 0)), "物3");
    conversation_close(c);
}

/* Facts are removed from the store too. */
static void test_remove_facts(void **state) {
    (void)state;
    struct store *s = store_open(db, &err);
    struct conversation *c = conversation_start(s);
    json_t *facts = json_pack("{s:s,s:[s,s],s:[s]}", "name", "Ann", "likes", "green tea", "囲碁",
                              "other", "Ann lives in Osaka");
    struct buf text = {0};
    int n;
    assert_int_equal(conversation_merge_facts(c, facts, &err), OK);
    assert_int_equal(conversation_remove_facts(c, "coffee", &n, &err), OK);
    assert_int_equal(n, 0);
    assert_int_equal(conversation_remove_facts(c, "ann", &n, &err), OK); /* whatever the case */
    assert_int_equal(n, 2);
    conversation_close(c);
    c = conversation_start(s);
    conversation_summary_and_facts(c, LANG_EN, &text);
    assert_string_equal(text.data, "Known facts: likes: green tea, 囲碁\n");
    assert_int_equal(conversation_remove_facts(c, NULL, &n, &err), OK);
    assert_int_equal(n, 2);
    text.len = 0;
    conversation_summary_and_facts(c, LANG_EN, &text);
    assert_int_equal(text.len, 0);
    buf_release(&text);
    json_decref(facts);
    conversation_close(c);
    store_close(s);
}

/* In each language, the schema for a model's facts and conversation_merge_facts accept a valid
 * example. */
static void test_schema(void **state) {
    (void)state;
    static const char *const good[N_LANGUAGES] = {
        "{\"その他の情報\":[],\"名前\":\"太郎\",\"好きなもの\":[\"寿司\",\"茶\"],\"興味\":[]}",
        "{\"interests\":[\"chess\"],\"likes\":[],\"name\":null,\"other\":[]}",
        "{\"兴趣\":[\"围棋\"],\"其他信息\":[],\"名字\":\"小明\",\"喜欢的东西\":[]}"};
    for (int l = 0; l < N_LANGUAGES; l++) {
        char *schema = conversation_facts_schema((enum language)l);
        struct grammar *g = grammar_new_json_schema(schema, strlen(schema), true, &err);
        if (!g) fail_msg("%s: %s", schema, err.text);
        struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
        struct grammar_state at = grammar_state_new(m);
        if (!grammar_accept_bytes(&at, good[l], strlen(good[l])) || !grammar_is_final(&at))
            fail_msg("%s takes no %s", schema, good[l]);
        json_t *facts = json_loads(good[l], 0, NULL);
        struct conversation *c = conversation_start(NULL);
        assert_int_equal(conversation_merge_facts(c, facts, &err), OK);
        conversation_close(c);
        json_decref(facts);
        grammar_state_release(&at);
        grammar_machine_free(m);
        grammar_free(g);
        free(schema);
    }
}

static void test_damaged_conversation(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "3",
        "{}",
        "{\"exchanges\": [{\"user\": 1}], \"summary\": \"\", \"facts\": {}}",
        "{\"exchanges\": [], \"summary\": \"\", \"facts\": {\"名前\": []}}",
        "{\"exchanges\": [], \"summary\": \"\", \"facts\": {\"興味\": [1]}}",
        "{\"exchanges\": [], \"summary\": 1, \"facts\": {}}"};
    struct store *s = store_open(db, &err);
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        json_t *v = json_loads(wrong[i], JSON_DECODE_ANY, NULL);
        assert_int_equal(store_document_put(s, "conversation", "x", v, &err), OK);
        assert_null(conversation_open(s, "x", &err));
        assert_int_equal(err.code, ERR_FORMAT);
        json_decref(v);
    }
    store_close(s);
}

static void memory_case(char **field, const char *where) {
    struct conversation *c = conversation_start(NULL);
    struct buf out = {0};
    json_t *v = json_loads(field[0], 0, NULL);
    if (!v || conversation_merge_facts(c, v, &err) != OK) fail_msg("%s: %s", where, err.text);
    bool known = conversation_answer_from_facts(c, field[1], &out);
    if (strcmp(known ? out.data : "-", field[2]) != 0)
        fail_msg("%s: '%s', not '%s'", where, known ? out.data : "-", field[2]);
    buf_release(&out);
    json_decref(v);
    conversation_close(c);
}

static void test_memory_questions(void **state) {
    (void)state;
    cases_run("test/cases/memory.txt", 3, memory_case);
}

/* A query equal to a text finds the text by the engine's embeddings. */
static void test_engine_embedder(void **state) {
    (void)state;
    struct model_config shape;
    assert_int_equal(model_preset_find("tiny-llama", &shape, &err), OK);
    struct model *m = model_new_random(&shape, 3, NUMERIC_EXACT);
    struct engine_options o = {.max_rows = 64, .max_seqs = 2, .max_len = 48};
    struct engine *e = engine_new(m, &o, &err);
    struct engine_embedder x = {.engine = e, .model = m, .max_len = 48};
    struct embedder embed;
    m->tok = m->tok ? m->tok : tokenizer_new_bytes(shape.vocab_size);
    if (!e || embedder_open(&embed, &x, &err) != OK) fail_msg("%s", err.text);
    write_folder();
    struct knowledge *k = open_ok();
    assert_int_equal(add_ok(k, "docs", &embed).embedded, 5);
    struct knowledge_query q = {.text = "犬\n子犬は犬の子供です。", .mix = 1, .embedder = &embed};
    json_t *hits = knowledge_search(k, &q, &err);
    assert_string_equal(hit_text(hits, 0, "title"), "犬");
    assert_true(json_real_value(json_object_get(json_array_get(hits, 0), "cosine")) > 0.999999);
    json_decref(hits);
    knowledge_close(k);
    engine_free(e);
    model_close(m);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_question_types),
        TEST(test_roles),
        TEST(test_languages),
        TEST(test_cut),
        TEST(test_chunks),
        TEST(test_html),
        TEST(test_markdown),
        TEST(test_terms),
        TEST(test_search),
        TEST(test_snippets),
        TEST(test_changes),
        TEST(test_chunk_size),
        TEST(test_bad_files),
        TEST(test_other_databases),
        TEST(test_embeddings),
        TEST(test_bm25_scores),
        TEST(test_kill),
        TEST(test_conversation),
        TEST(test_conversation_without_summary),
        TEST(test_facts),
        TEST(test_cleanup),
        TEST(test_cleanup_of_anything),
        TEST(test_facts_extracted_by_rules),
        TEST(test_facts_grounded),
        TEST(test_remove_facts),
        TEST(test_schema),
        TEST(test_damaged_conversation),
        TEST(test_memory_questions),
        TEST(test_engine_embedder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
