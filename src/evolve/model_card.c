/*
 * model_card: the README.md that Hugging Face shows for an adapter. Names come from recipes and
 * files, so they are quoted for YAML, for Markdown and for the shell.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A double-quoted scalar; JSON strings are valid YAML. */
static void add_yaml_text(struct buf *b, const char *s) {
    struct buf line = {0};
    buf_add_one_line(&line, s);
    json_t *v = json_stringn(line.data ? line.data : "", line.len);
    char *text = json_dumps(v, JSON_ENCODE_ANY);
    buf_puts(b, text);
    free(text);
    json_decref(v);
    buf_release(&line);
}

/* Escapes all Markdown punctuation with backslashes. */
static void add_markdown_text(struct buf *b, const char *s) {
    struct buf line = {0};
    buf_add_one_line(&line, s);
    for (size_t i = 0; i < line.len; i++) {
        if (strchr("\\`*_{}[]<>()#|&~!$", line.data[i])) buf_puts(b, "\\");
        buf_add(b, line.data + i, 1);
    }
    buf_release(&line);
}

/* Quotes text, on one line, as one word of a shell command. */
static void add_shell_word(struct buf *b, const char *s) {
    struct buf line = {0};
    buf_add_one_line(&line, s);
    buf_puts(&line, "");
    buf_add_shell_word(b, line.data);
    buf_release(&line);
}

static void add_text_row(struct buf *b, const char *title, const char *text) {
    buf_printf(b, "| %s | ", title);
    add_markdown_text(b, text);
    buf_puts(b, " |\n");
}

static void add_number_row(struct buf *b, const char *title, double v) {
    if (isfinite(v)) buf_printf(b, "| %s | %.4g |\n", title, v);
}

static void add_front_matter(struct buf *b, const char *model) {
    buf_puts(b, "---\nbase_model: ");
    add_yaml_text(b, model);
    buf_puts(b, "\nlibrary_name: peft\ntags:\n- lora\n- shoal\n- evolution\n---\n\n");
}

static void add_origin(struct buf *b, const char *run, int generation, const json_t *c) {
    const json_t *parents = json_object_get(c, "parents"), *parent;
    const char *operator_name = operator_label(c, "operator");
    size_t i;
    buf_puts(b, "| origin | |\n|---|---|\n");
    add_text_row(b, "run", run);
    buf_printf(b, "| generation | %d |\n", generation);
    add_text_row(b, "made by",
                 *operator_name                ? operator_name
                 : json_object_get(c, "genes") ? "other genes, the parent's weights"
                 : json_array_size(parents)    ? "crossover"
                                               : "training");
    json_array_foreach (parents, i, parent)
        add_text_row(b, i ? "second parent" : "parent",
                     json_string_value(parent) ? json_string_value(parent) : "");
    add_number_row(b, "share of the second parent", json_number_or_nan(c, "blend"));
    add_number_row(b, "step", json_number_or_nan(c, "step"));
    add_text_row(b, "SHA-256 of config and weights", json_get_string(c, "hash"));
}

static void add_genes(struct buf *b, const json_t *genes) {
    if (!genes) return;
    buf_puts(b, "\n| gene | |\n|---|---|\n");
    for (int g = 0; g < N_GENES; g++) {
        const json_t *x = json_object_get(genes, gene_names[g]);
        if (json_is_string(x))
            add_text_row(b, "system prompt", json_string_length(x) ? json_string_value(x) : "none");
        else if (x)
            add_number_row(b, gene_names[g], json_number_value(x));
    }
}

static void add_scores(struct buf *b, const json_t *c) {
    static const char *const keys[] = {"fitness", "performance", "cooperation", "novelty"};
    double items = json_number_or_nan(c, "items");
    buf_puts(b, "\n| score | value | 95 % interval |\n|---|---|---|\n");
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        struct stats_interval x = json_interval(c, keys[i]);
        if (!isfinite(x.value)) continue;
        buf_printf(b, "| %s | %.4f | ", keys[i], x.value);
        if (isfinite(x.lo) && isfinite(x.hi)) buf_printf(b, "%.4f – %.4f", x.lo, x.hi);
        buf_puts(b, " |\n");
    }
    if (isfinite(items)) buf_printf(b, "\nMeasured on %.0f questions.", items);
    buf_puts(b, "\nSelection used these scores, so those of the best of a generation are biased "
                "upwards. Held-out "
                "results are in the run's report.html.\n");
}

int model_card_write(const char *dir, const char *model, const char *run, int generation,
                     const json_t *candidate, struct error *err) {
    struct buf b = {0};
    char *path = path_join(dir, "README.md");
    add_front_matter(&b, model);
    buf_puts(&b, "# ");
    add_markdown_text(&b, json_get_string(candidate, "name"));
    buf_puts(&b, "\n\nA LoRA adapter of ");
    add_markdown_text(&b, model);
    buf_puts(&b, ", from a population that `shoal evolve` bred.\n\n");
    add_origin(&b, run, generation, candidate);
    const json_t *genes = json_object_get(candidate, "genes");
    const char *prompt = json_get_string(genes, gene_names[GENE_PROMPT]);
    add_genes(&b, genes);
    add_scores(&b, candidate);
    buf_puts(&b, "\nTo use it (DIR is the folder of this file):\n\n    shoal run ");
    add_shell_word(&b, model);
    buf_puts(&b, " --adapter DIR --chat 'a question'");
    if (*prompt) {
        buf_puts(&b, " --system ");
        add_shell_word(&b, prompt);
    }
    buf_puts(&b, "\n");
    if (*prompt) buf_puts(&b, "\nThe scores are those of the adapter with this system prompt.\n");
    int rc = file_write(path, b.data, b.len, err);
    buf_release(&b);
    free(path);
    return rc;
}
