/*
 * bbh: the descriptions of BIG-Bench Hard's subjects, in the wording of lm-evaluation-harness.
 */
#include "eval/eval.h"

#include <string.h>

/* A row applies to all subjects whose names begin with its name. */
static const char *const descriptions[][2] = {
    {"boolean_expressions", "Evaluate the result of a random Boolean expression."},
    {"causal_judgement", "Answer questions about causal attribution."},
    {"date_understanding", "Infer the date from context."},
    {"disambiguation_qa", "Clarify the meaning of sentences with ambiguous pronouns."},
    {"dyck_languages", "Correctly close a Dyck-n word."},
    {"formal_fallacies", "Distinguish deductively valid arguments from formal fallacies."},
    {"geometric_shapes", "Name geometric shapes from their SVG paths."},
    {"hyperbaton", "Order adjectives correctly in English sentences."},
    {"logical_deduction",
     "A logical deduction task which requires deducing the order of a sequence of objects."},
    {"movie_recommendation", "Recommend movies similar to the given list of movies."},
    {"multistep_arithmetic", "Solve multi-step arithmetic problems."},
    {"navigate", "Given a series of navigation instructions, determine whether one would end up "
                 "back at the starting point."},
    {"object_counting",
     "Questions that involve enumerating objects and asking the model to count them."},
    {"penguins_in_a_table", "Answer questions about a table of penguins and their attributes."},
    {"reasoning_about_colored_objects",
     "Answer extremely simple questions about the colors of objects on a surface."},
    {"ruin_names", "Select the humorous edit that 'ruins' the input movie or musical artist name."},
    {"salient_translation_error_detection",
     "Detect the type of error in an English translation of a German source sentence."},
    {"snarks", "Determine which of two sentences is sarcastic.\n\n"
               "According to Cambridge University Dictionary, sarcasm is \"the use of remarks that "
               "clearly mean the opposite of what they say, made in order to hurt someone's "
               "feelings or to criticize something in a humorous way.\" Sarcastic sentences often "
               "contain satirical or ironic utterances, hyperboles, ambivalent or witty remarks."},
    {"sports_understanding", "Determine whether an artificially constructed sentence relating to "
                             "sports is plausible or not."},
    {"temporal_sequences", "Task description: Answer questions about which times certain events "
                           "could have occurred."},
    {"tracking_shuffled_objects",
     "A task requiring determining the final positions of a set of objects given their initial "
     "positions and a description of a sequence of swaps."},
    {"web_of_lies", "Evaluate a random boolean function expressed as a word problem."},
    {"word_sorting", "Sort a list of words."},
};

const char *bbh_description(const char *subject) {
    for (size_t i = 0; i < ARRAY_LEN(descriptions); i++)
        if (strncmp(subject, descriptions[i][0], strlen(descriptions[i][0])) == 0)
            return descriptions[i][1];
    return NULL;
}
