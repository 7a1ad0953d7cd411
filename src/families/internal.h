/* families: helpers that the files of the families share. */
#ifndef SHOAL_FAMILIES_INTERNAL_H
#define SHOAL_FAMILIES_INTERNAL_H

#include "families/families.h"

enum { EN, JA, ZH };
extern const char *const family_languages[]; /* [3] "en", "ja", "zh" */
int item_language(struct rng *r);            /* six in ten items are English, two each the others */
enum { FAMILY_WORDS = 8 };
/* [language][FAMILY_WORDS] words of the same meaning or role have the same index. */
extern const char *const family_people[3][FAMILY_WORDS], *const family_towns[3][FAMILY_WORDS];
enum { FAMILY_PROSE = 240 };
extern const char *const family_prose[3][FAMILY_PROSE]; /* [language] everyday sentences */
int rng_between(struct rng *r, int lo, int hi);         /* lo to hi, inclusive */

/* The first choice that is added is the right one. Equal choices are added once. */
void item_add_choice(struct task_item *it, const char *text);
void item_add_number(struct task_item *it, int value);
/* Adds wrong answers near the right number, up to four choices. */
void item_add_near_numbers(struct rng *r, struct task_item *it, int right);
/* The larger (or smaller) of two different numbers of three digits. The family `duplicate_name`
 * asks for the larger one too, with the words `check_asks`. */
void item_compare_numbers(struct rng *r, struct task_item *it, const char *const asks[],
                          const char *const check_asks[], const char *name,
                          const char *duplicate_name, bool smaller);

/* The answer in the templates of a check. A check asks the common variant of a family, which the
 * base model knows, in such a way that a wrong answer needs another reply. The check of a common
 * variant is another question than the item's, so that the base model has no chance to repeat its
 * error. */
#define CHECKED_ANSWER "{{ answer }}"
/* Questions of families whose items are checked with the words of another one, [language]. */
extern const char *const compare_asks[3], *const pick_larger_asks[3]; /* two %d */
extern const char *const sort_asks[3], *const order_up_asks[3];       /* %s: letters */

/* Writes n distinct random letters and a NUL to v. */
void sample_letters(struct rng *r, char *v, int n);
void letters_join(char *out, const char *v, int n); /* "a b c", with a NUL: 2n bytes */
int compare_letters(const void *a, const void *b);  /* for qsort */
void item_add_letters(struct task_item *it, const char *v, int n); /* a choice "a b c" */
/* Adds wrong answers that differ from the right one by an exchange of two letters. */
void item_add_swapped_letters(struct rng *r, struct task_item *it, const char *right, int n);

extern const struct task_family copy_family, sort_family, compare_family, sequence_family,
    voice_family, arithmetic_family, pick_family, order_family, route_family, syllogism_family,
    lookup_family, form_family, machine_family, sums_family, judge_family, deduction_family,
    retrieval_family, needle_family, tools_family, about_family, dialogue_family;

#endif
