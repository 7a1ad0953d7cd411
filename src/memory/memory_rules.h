/*
 * memory_rules: the tables of memory_rules.c, one per language. Private to this folder.
 */
#ifndef SHOAL_MEMORY_MEMORY_RULES_H
#define SHOAL_MEMORY_MEMORY_RULES_H

#include "memory/internal.h"

/* RULE_LIST: the value is an enumeration. RULE_PAIR: the value is group 1, a space and group 2.
 * RULE_SWAP: group 2 and group 1. RULE_NAMES: group 2 is an enumeration of names, each with group 1
 * before it. RULE_ENDS: the fact no longer holds. RULE_CORRECTS: group 1 is the new value, group 2
 * the old one; with RULE_ENDS: the value learnt last no longer holds. RULE_EACH: every match of a
 * clause. RULE_KIN: also in a clause whose subject is another person. RULE_NAMED: group 1 is names
 * of the last fact of the message, which must hold and have the attribute and no name yet ("We have
 * a cat. Her name is Ada"), or the bearer of the clause before ("My cat is ill. Her name is Ada").
 * RULE_ALSO: only in a message with another fact ("Ann, 43, a plumber"). RULE_AMENDS: only in a
 * message that says that it corrects something. */
enum rule_flag {
    RULE_LIST = 1,
    RULE_PAIR = 2,
    RULE_SWAP = 4,
    RULE_NAMES = 8,
    RULE_ENDS = 16,
    RULE_CORRECTS = 32,
    RULE_EACH = 64,
    RULE_KIN = 128,
    RULE_NAMED = 256,
    RULE_ALSO = 512,
    RULE_AMENDS = 1024
};
struct rule {
    const char *attribute;
    unsigned flags;
    const char *pattern;
};
/* A pattern and why what matches is refused; or its replacement. */
struct refusal {
    const char *reason, *pattern;
};

/* The tables end with a row whose pattern is NULL. */
struct memory_rules {
    const struct rule *facts;      /* rules, grouped by attribute */
    const struct refusal *message, /* refuse the rest of the message, from the match on */
        *sentence,                 /* refuse a sentence */
        *clause,                   /* refuse a clause; with some reasons also those after it */
        *expand,                   /* rewrite a sentence: reason is the replacement */
        *contract,                 /* the reverse of expand, for values; NULL: none */
        *asked; /* a question of the assistant; reason is put before a bare answer */
    /* Pairs of characters of 3 bytes, sorted by the first; the second replaces it. NULL: none */
    const char *fold;
    const char *role_play, *role_play_end; /* begin and end of a role play */
    const char *real;                      /* a sentence in a role play that is not a part of it */
    const char *split;                     /* the places between clauses */
    const char *filler;          /* words at the beginning of a clause without a meaning */
    const char *self;            /* a clause whose subject is the user */
    const char *third;           /* a clause whose subject is another person or a thing */
    const char *question;        /* a sentence that is or ends with a question */
    const char *question_clause; /* a clause of such a sentence that asks */
    const char *list;            /* between the items of an enumeration */
    const char *count;           /* a number before an animal or a relative */
    const char *shift; /* a clause after which a missing subject is not the user; NULL: none */
    const char *join;  /* between two sentences that are one: "My PIN is 1234. Remember that." */
    const char *continues; /* a later clause without a subject whose subject is the user; NULL */
    const char *bearer_family, *bearer_pet; /* group 1: a relative or an animal of the user */
    const char *amends;                     /* a message that corrects something */
    const char *trim;                       /* at the ends of a value */
    const char
        *no_item; /* text after the first item of an enumeration that belongs to something else */
    const char *no_value; /* a text that cannot be a value */
    bool keeps_subject;   /* a sentence without a subject continues the one before */
};
extern const struct memory_rules memory_rules_en, memory_rules_ja, memory_rules_zh;

#endif
